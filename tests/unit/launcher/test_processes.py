"""The nursery and its ranks, as their agent has them: all started or none, and nothing left of them."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launcher.processes import Processes, StartFailed
from tests.commands import is_running, wait_for

# A rank whose child has left its group, as daemons do.
DAEMON = """
import pathlib, subprocess, time
daemon = subprocess.Popen(["sleep", "60"], start_new_session=True)
pathlib.Path("daemon.part").write_text(str(daemon.pid))
pathlib.Path("daemon.part").rename("daemon")
time.sleep(60)
"""


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(DAEMON)
    processes = Processes(["script.py"], is_warm=False)
    yield processes
    processes.close()


def daemon_of(folder: Path) -> int:
    wait_for((folder / "daemon").exists, 20, "the daemon was started")
    pid = int((folder / "daemon").read_text())
    (folder / "daemon").unlink()
    return pid


def test_nothing_that_a_rank_has_started_outlives_its_attempt_or_the_job(tmp_path: Path, processes: Processes) -> None:
    processes.start([{}])
    first = daemon_of(tmp_path)
    processes.end()
    wait_for(lambda: not is_running(first), 5, "the attempt's daemon is gone")
    processes.start([{}])
    second = daemon_of(tmp_path)
    processes._close_nursery()  # as when the agent is killed
    assert not is_running(second)


def test_a_nursery_that_was_stopped_is_woken(processes: Processes) -> None:
    processes.start([{}])
    nursery = processes._nursery
    assert nursery is not None
    os.kill(nursery.pid, signal.SIGSTOP)
    os.kill(processes.ranks[0].pid, signal.SIGKILL)
    assert processes.await_ends(timeout_s=10)
    assert processes.ranks[0].exit_code == -signal.SIGKILL


def test_a_nursery_that_cannot_live_is_one_clear_line(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.launcher.processes.sys.executable", "/bin/false")
    with pytest.raises(StartFailed, match=r"^the ranks cannot be started: .* has ended, twice; .*$") as caught:
        processes.start([{}])
    assert caught.value.exit_code == 3


def test_who_stops_a_start_meets_no_half_of_the_ranks(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their agent knows them by their places: with some missing it would take one for another."""
    await_start, asked = processes._await_start, []

    def interrupted() -> int:
        asked.append(time.monotonic())
        if len(asked) == 2:
            raise KeyboardInterrupt
        return await_start()

    monkeypatch.setattr(processes, "_await_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.start([{}, {}])
    assert processes.ranks == []
