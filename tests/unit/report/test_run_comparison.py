"""Several runs compared: throughput, speed-up, efficiency, and whether their bits are equal."""

from pathlib import Path

import pytest

from lockstep.observe.run_record import read_record
from lockstep.report.run_comparison import Throughput, compare_runs, comparison_lines
from tests.run_folders import finished_run, search_run, start, write_run


def test_a_scaling_report(tmp_path: Path) -> None:
    one = finished_run(tmp_path / "one", 1)
    four = finished_run(tmp_path / "four", 4, speed=3.0)
    rows = compare_runs([read_record(four), read_record(one)])
    assert [(row.processes, row.speed_up, row.max_speed_up) for row in rows] == [
        (1, 1.0, 1.0),
        (4, pytest.approx(3.0), 4.0),
    ]
    assert rows[1].efficiency == pytest.approx(0.75)
    text = "\n".join(comparison_lines(rows))
    assert "×3.00" in text and "75%" in text
    assert "digests: equal, 2 runs ended with the same bits" in text


def test_different_bits_and_different_work_are_noted(tmp_path: Path) -> None:
    one = finished_run(tmp_path / "one", 1)
    two = finished_run(tmp_path / "two", 2, digest="cd" * 32)
    half = write_run(tmp_path / "half", [start(processes=4, effective_batch=128)])
    lines = comparison_lines(compare_runs([read_record(path) for path in (one, two, half)]))
    assert lines[3].endswith("not finished")
    assert lines[5:] == [
        "not the same work: the runs have different batches (128, 64)",
        "digests: 2 different digests in 2 finished runs",
        "no step has been timed in half",
    ]


def test_searches_are_compared_by_designs_per_second(tmp_path: Path) -> None:
    record = read_record(search_run(tmp_path / "run"))
    first, second = compare_runs([record, record])
    assert (first.throughput, second.speed_up) == (Throughput(8.0, "designs/s"), 1.0)
