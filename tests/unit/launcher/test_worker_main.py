"""A failing rank's error report can be read, whatever it contains and whatever happens meanwhile."""

from pathlib import Path

import pytest

from lockstep.launcher.worker_main import write_error_report
from lockstep.supervision.failure_report import read_error_report
from tests.commands import LOCKSTEP, run

# Torch's data loader installs such a handler; here its signal always comes while the error is being formatted.
FAILS_WITH_ITS_DATA_WORKER = """
import os, signal

def on_child_ended(number, frame):
    raise RuntimeError("DataLoader worker is killed by signal: Killed.")

class LostConnection(Exception):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGCHLD)
        return "reset by peer"

signal.signal(signal.SIGCHLD, on_child_ended)
raise LostConnection
"""


@pytest.mark.parametrize("character", ["x", "😀", "\ud800"])
def test_a_report_of_any_length_and_characters_can_be_read(tmp_path: Path, character: str) -> None:
    write_error_report(ValueError(character * 1_000_000), tmp_path / "rank-0.json")
    report = read_error_report(tmp_path / "rank-0.json")
    assert report is not None
    assert report.error.startswith(f"ValueError: {character * 100}")


def test_a_data_worker_that_dies_meanwhile_does_not_interrupt_the_report(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FAILS_WITH_ITS_DATA_WORKER)
    finished = run([*LOCKSTEP, "run", "-n", "1", "script.py"], tmp_path)
    assert finished.code == 3
    assert "LostConnection: reset by peer" in finished.err.splitlines()[0]
    assert "DataLoader worker" not in finished.err
