"""The report for programs: its keys, and only values that JSON can hold."""

import json
from pathlib import Path

from lockstep.observe.run_record import read_record
from lockstep.observe.run_status import RunStatus
from lockstep.report.json_report import report_values
from lockstep.report.run_comparison import compare_runs
from tests.run_folders import event, finished_run, start, timed, write_run

ENDED = RunStatus("ended", "finished")


def test_a_run_with_its_times_straggler_and_findings(tmp_path: Path) -> None:
    waits = [timed(step, exchange_s=0.13) for step in (10, 20, 30, 40)]
    slow = [timed(step, compute_s=0.21) for step in (10, 20, 30, 40)]
    record = read_record(write_run(tmp_path, [start()], {0: waits, 1: slow}))
    (run,) = report_values([record], [RunStatus("left", "")], [])["runs"]
    assert run["straggler"]["rank"] == 1
    assert [times["rank"] for times in run["times"]] == [0, 1]
    assert [finding["about"] for finding in run["findings"]] == ["straggler"]
    assert run["state"] == "left"


def test_the_keys_stay(tmp_path: Path) -> None:
    records = [read_record(finished_run(tmp_path / str(processes), processes)) for processes in (1, 2)]
    values = report_values(records, [ENDED] * 2, compare_runs(records))
    assert " ".join(values["runs"][1]) == (
        "path run_id state step total_steps attempts num_restarts recipe parameters processes device backend "
        "effective_batch lanes precision parallel samples_per_s numbers saves restarts incidents times straggler "
        "findings digest"
    )
    assert " ".join(values["runs"][1]["saves"]) == "num newest_step best_step num_bytes stall_s write_s"
    assert " ".join(values["runs"][1]["times"][0]) == (
        "rank num_timed num_lanes phases compute_spread_s travel_s sent_bytes saving evaluating steps_per_s "
        "peak_host_bytes peak_device_bytes step_s hidden training_per_s"
    )
    assert " ".join(values["runs"][1]["times"][0]["phases"]) == "data compute exchange update rest"
    assert " ".join(values["scaling"][0]) == "path processes per_s unit speed_up possible efficiency digest"
    assert [row["processes"] for row in values["scaling"]] == [1, 2]


def test_wrong_and_nonfinite_values_can_be_written(tmp_path: Path) -> None:
    wrong = {"processes": "two", "effective_batch": -1, "lanes": [], "total_steps": "x", "parameters": float("nan")}
    events = [start(**wrong), event("step", 1, loss="nan")]
    record = read_record(write_run(tmp_path, events, {0: [timed(10)]}))
    json.dumps(report_values([record], [ENDED], []), allow_nan=False)
