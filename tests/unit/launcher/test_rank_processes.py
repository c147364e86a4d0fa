"""The fork server and its ranks: all ranks are started or none, and nothing is left of them."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.launcher.rank_processes import RankProcesses, RankStartError, start_fork_server
from tests.commands import is_running, wait_for

# A rank whose child has left its process group, as daemons do.
DAEMON = """
import pathlib, subprocess, time
daemon = subprocess.Popen(["sleep", "60"], start_new_session=True)
pathlib.Path("daemon.part").write_text(str(daemon.pid))
pathlib.Path("daemon.part").rename("daemon")
time.sleep(60)
"""


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankProcesses]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(DAEMON)
    processes = RankProcesses(["script.py"], is_warm=False)
    yield processes
    processes.close()


def daemon_of(folder: Path) -> int:
    wait_for((folder / "daemon").exists, 20, "the daemon was started")
    pid = int((folder / "daemon").read_text())
    (folder / "daemon").unlink()
    return pid


def test_what_a_rank_has_started_ends_with_the_attempt_and_with_the_job(
    tmp_path: Path, processes: RankProcesses
) -> None:
    processes.start([{}])
    first = daemon_of(tmp_path)
    processes.end()
    wait_for(lambda: not is_running(first), 5, "the attempt's daemon is gone")
    processes.start([{}])
    second = daemon_of(tmp_path)
    processes._close_server()  # as when the agent is killed
    assert not is_running(second)


def test_a_stopped_fork_server_is_resumed(processes: RankProcesses) -> None:
    processes.start([{}])
    server = processes._server
    assert server is not None
    os.kill(server.pid, signal.SIGSTOP)
    os.kill(processes.ranks[0].pid, signal.SIGKILL)
    assert processes.wait_for_ends(timeout_s=10)
    assert processes.ranks[0].exit_code == -signal.SIGKILL


def test_a_fork_server_that_cannot_start_is_one_clear_line(
    processes: RankProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.launcher.rank_processes.sys.executable", "/bin/false")
    with pytest.raises(RankStartError, match=r"^the ranks cannot be started: .* has ended, twice; .*$") as caught:
        processes.start([{}])
    assert caught.value.exit_code == 3


def test_an_interrupted_start_leaves_no_ranks_behind(processes: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent identifies ranks by their index in the list: with some missing it would mistake one for another."""
    wait_for_start, calls = processes._wait_for_start, []

    def interrupted() -> int:
        calls.append(time.monotonic())
        if len(calls) == 2:
            raise KeyboardInterrupt
        return wait_for_start()

    monkeypatch.setattr(processes, "_wait_for_start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.start([{}, {}])
    assert processes.ranks == []


def test_a_fork_server_whose_agent_is_gone_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent was killed while the server's interpreter was still starting."""
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    ours, theirs = socket.socketpair()
    ours.close()
    server = start_fork_server(theirs.fileno(), ["warm", "train.py"])
    theirs.close()
    assert server.wait(30) == 0
    assert not (tmp_path / "imported").exists()
