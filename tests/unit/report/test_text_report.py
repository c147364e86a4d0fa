"""The text report says what a run is, how it went and where its time went."""

from pathlib import Path

from lockstep.observe.run_record import read_record
from lockstep.observe.run_status import RunLock, RunStatus, run_status
from lockstep.report.text_report import history_lines, report_lines
from tests.run_folders import event, finished_run, search_run, start, timed, write_run

ENDED = RunStatus("ended", "finished")


def test_the_report_of_a_finished_run(tmp_path: Path) -> None:
    record = read_record(finished_run(tmp_path / "mine"))
    text = "\n".join(report_lines(record, run_status(record, RunLock(False, ""))))
    for part in (
        "digits, 1,234 parameters",
        "finished after step 40 of 40",
        "2 processes on cpu (gloo), batch of 64 in 4 lanes, fp32, parallel: ddp, 400 samples/s",
        "1 checkpoint: newest at step 40 (5.0 kB), best at step 40; each save blocked training for 10.0 ms",
        f"digest {'ab' * 32}",
        "test/accuracy",
        "gradients, rank 1: 4.0 kB sent per step, 50.0 ms in transit, 60% of it during the backward pass",
        "nothing stands out",
    ):
        assert part in text
    heading = "  rank  lanes  data wait   compute  gradient wait   update  other      step"
    assert [line for line in text.splitlines() if line.startswith(heading)]
    assert [line.split()[:8] for line in text.splitlines() if line.startswith("  1    ")] == [
        ["1", "2", "10.0", "ms", "100.0", "ms", "20.0", "ms"]
    ]


def test_restarts_and_incidents_in_order_of_time(tmp_path: Path) -> None:
    events = [
        start(),
        event("step", 30, loss=1.0),
        event("incident", 30, t=1040, text="a disk is full"),
        event("restart", 10, attempt=2, t=2000, cause="rank 1 was killed"),
        start(10, attempt=2, processes=1),
    ]
    events[-1]["t"] = 2001.0
    assert history_lines(read_record(write_run(tmp_path, events))) == [
        "00:17:20  a disk is full",
        "00:33:21  attempt 2 on 1 process after rank 1 was killed: from step 10, repeating at least 20 steps",
    ]


def test_wrong_values_in_a_start_event_are_ignored(tmp_path: Path) -> None:
    wrong = {"processes": "two", "effective_batch": -1, "lanes": [], "total_steps": "x", "parameters": None}
    record = read_record(write_run(tmp_path, [start(**wrong)], {0: [timed(10)]}))
    assert "1 process on cpu" in "\n".join(report_lines(record, ENDED))


def test_control_characters_of_a_run_are_not_printed(tmp_path: Path) -> None:
    evil = "\x1b[2Jcleared\r\n"
    events = [start(recipe=evil, device=evil), event("step", 10, **{evil: 1.0}), event("incident", 10, text=evil)]
    lines = report_lines(read_record(write_run(tmp_path, events)), ENDED)
    assert any("cleared" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_the_report_of_a_search(tmp_path: Path) -> None:
    text = "\n".join(report_lines(read_record(search_run(tmp_path / "run")), ENDED))
    assert "3 genes, 4 designs per generation, guided by a network" in text
    assert "per generation on 2 processes: evaluating 500.0 ms" in text
    assert "2 of 8 designs could not be evaluated; most often: it failed" in text
