"""Watching the progress of a job by its heartbeats."""

import pytest

from lockstep.chaos.launched_job import ProgressWatcher
from lockstep.supervision.heartbeat import Heartbeat, Phase


class FakeJob:
    """A job with one rank."""

    def __init__(self) -> None:
        self.step = 0

    def heartbeats(self) -> dict[int, Heartbeat]:
        return {
            0: Heartbeat(
                pid=1,
                main_thread=1,
                step=self.step,
                phase=Phase.COMPUTING,
                since=0.0,
                sample=None,
                is_stopping=False,
                has_compiler=False,
                longest_s={},
                data_workers=[],
            )
        }


def test_a_rank_that_survives_the_kill_of_another_process_still_makes_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    watch, job = ProgressWatcher(), FakeJob()
    watch.look(job)  # type: ignore[arg-type]
    watch.expect_ranks_to_end(job)  # type: ignore[arg-type]
    for job.step in range(1, 4):
        now += 10.0
        progress = watch.look(job)  # type: ignore[arg-type]
        assert watch.idle_s == 0.0
        assert progress.first_step is None, "it was expected to end"
    now += 10.0
    watch.look(job)  # type: ignore[arg-type]
    assert watch.idle_s == 10.0
