"""What a failing rank says of itself arrives."""

from pathlib import Path

import pytest

from lockstep.launcher.worker import leave_report
from lockstep.supervision.failure import read_report


@pytest.mark.parametrize("letter", ["x", "😀", "\ud800"])
def test_a_report_of_any_length_and_letters_can_be_read(tmp_path: Path, letter: str) -> None:
    leave_report(ValueError(letter * 1_000_000), tmp_path / "rank-0.json")
    report = read_report(tmp_path / "rank-0.json")
    assert report is not None
    assert report.error.startswith(f"ValueError: {letter * 100}")
