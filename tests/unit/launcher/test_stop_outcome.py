"""How a job that was asked to stop has ended: code 75 only where the same command continues it."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from lockstep.launcher.stop_outcome import judge_stop
from lockstep.supervision.failure_report import ErrorReport, RankExit

SAVED = ErrorReport(0.0, "Stopped: stopped after step 3, as requested: continue", "", True, 75, False)


@pytest.mark.parametrize("has_checkpoint", [False, True])
@pytest.mark.parametrize(
    ("exits", "code", "words"),
    [
        ([], 143, "no checkpoint"),
        ([RankExit(0, 143), RankExit(1, -15)], 143, "no checkpoint"),
        ([RankExit(0, 0), RankExit(1, -9)], 143, "no checkpoint"),
        ([RankExit(0, 0), RankExit(1, 0)], 0, "ended by itself"),
        ([RankExit(0, 75), RankExit(1, 75)], 75, "ended by itself"),
    ],
)
def test_a_job_that_was_stopped_outside_of_a_loop(
    tmp_path: Path, exits: Sequence[RankExit], code: int, words: str, has_checkpoint: bool
) -> None:
    (tmp_path / "run.json").write_text("{}")
    if has_checkpoint:
        (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
        code, words = 75, f"continue from the newest checkpoint in {tmp_path}"
    outcome = judge_stop(signal.SIGTERM, exits, tmp_path)
    assert outcome.exit_code == code
    assert outcome.message.startswith("stopped on request (SIGTERM): ")
    assert words in outcome.message


def test_a_job_without_a_run_folder_has_the_code_of_the_signal() -> None:
    assert judge_stop(signal.SIGINT, [RankExit(0, 130)], None).exit_code == 130


def test_a_run_that_has_saved_itself_says_so() -> None:
    assert judge_stop(signal.SIGTERM, [RankExit(0, -9), RankExit(1, 1, SAVED)], None) == (
        75,
        "stopped after step 3, as requested: continue",
    )
