"""The state of a run, from its record and from who holds the lock on its folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.config.folder_remedies import IN_SCRIPT
from lockstep.errors import UserError
from lockstep.events.run_folder import RunFolder
from lockstep.observe.run_record import RunRecord, read_record
from lockstep.observe.run_status import RunLock, read_run_lock, run_status
from tests.run_folders import event, finished_run, start, write_run


def test_the_state_of_a_run(tmp_path: Path) -> None:
    assert run_status(RunRecord(tmp_path), RunLock(False, "")) == ("waiting", "not started yet")
    assert run_status(RunRecord(tmp_path), RunLock(True, "process 7 on x")) == ("running", "starting")
    unfinished = read_record(write_run(tmp_path / "a", [start(), event("checkpoint", 20)]))
    assert run_status(unfinished, RunLock(True, "process 7 on x")) == (
        "running",
        "running (process 7 on x): step 20 of 40",
    )
    assert run_status(unfinished, RunLock(False, "")) == (
        "left",
        "not running, not finished: step 20 of 40; start it again to resume from step 20",
    )
    unknown = run_status(unfinished, RunLock(None, ""))
    assert unknown.state == "unknown"
    assert unknown.text.startswith("not finished: step 20 of 40, last event ")
    finished = read_record(finished_run(tmp_path / "b"))
    assert run_status(finished, RunLock(True, "")) == ("ended", "finished after step 40 of 40")


def test_a_run_that_stopped_early_says_why(tmp_path: Path) -> None:
    events = [start(), event("step", 30, stopped="no progress"), event("end", 30, digest="x")]
    status = run_status(read_record(write_run(tmp_path, events)), RunLock(False, ""))
    assert status.text == "finished after step 30 of 40, stopped early: no progress"


def test_a_process_that_trains_in_a_folder_is_seen(tmp_path: Path) -> None:
    assert read_run_lock(tmp_path).is_held is False
    code = (
        "import sys; from pathlib import Path; from lockstep.events.run_folder import RunFolder\n"
        "from lockstep.config.folder_remedies import IN_SCRIPT\n"
        "lock = RunFolder(Path(sys.argv[1]))._lock(IN_SCRIPT); print('locked', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        lock = read_run_lock(tmp_path)
        assert lock.is_held
        assert lock.owner.startswith(f"process {holder.pid} on ")
        with pytest.raises(UserError, match="is in use"):  # reading the lock has not released it
            RunFolder(tmp_path)._lock(IN_SCRIPT)
    finally:
        holder.communicate()
    assert read_run_lock(tmp_path).is_held is False
