"""Each finding about a run is a sentence with a remedy; a run without findings says so."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.run_findings import run_findings, verdict_lines
from lockstep.observe.run_record import RunRecord, read_record
from tests.run_folders import event, start, timed, write_run

STEPS = (10, 20, 30, 40)


def record_of(
    folder: Path, *ranks: dict[str, Any], steps: tuple[int, ...] = STEPS, machines: int | None = None
) -> RunRecord:
    lines = {rank: [timed(step, **values) for step in steps] for rank, values in enumerate(ranks)}
    return read_record(
        write_run(folder, [start(processes=len(ranks)) | ({} if machines is None else {"machines": machines})], lines)
    )


def test_nothing_stands_out(tmp_path: Path) -> None:
    record = record_of(tmp_path, {}, {})
    assert run_findings(record) == []
    assert verdict_lines(record) == ["nothing stands out"]


def test_a_straggler_is_named_with_what_it_costs(tmp_path: Path) -> None:
    record = record_of(tmp_path, {"exchange_s": 0.13}, {"compute_s": 0.21}, {"exchange_s": 0.13})
    (finding,) = run_findings(record)
    assert finding.about == "straggler"
    assert finding.text == (
        "rank 1 is slow: its forward and backward pass takes 210.0 ms (100.0 ms on the other ranks), "
        "so the others wait 110.0 ms for it in every step"
    )


def test_waiting_for_a_straggler_is_not_reported_twice(tmp_path: Path) -> None:
    record = record_of(tmp_path, {"exchange_s": 0.3}, {"compute_s": 0.21, "exchange_s": 0.15})
    assert [finding.about for finding in run_findings(record)] == ["straggler"]


def test_more_lanes_are_given_as_the_reason(tmp_path: Path) -> None:
    record = record_of(tmp_path, {"exchange_s": 0.07}, {"compute_s": 0.15, "num_lanes": 3})
    (finding,) = run_findings(record)
    assert "it has 3 lanes, the other rank has 2" in finding.text
    assert "`lanes_per_rank`" in finding.text


def test_a_rank_that_works_longer_but_waits_as_long_is_no_straggler(tmp_path: Path) -> None:
    assert run_findings(record_of(tmp_path, {"compute_s": 0.13}, {})) == []


@pytest.mark.parametrize(
    ("values", "about", "text"),
    [
        ({"data_s": 0.1}, "data", "waiting for data: raise `workers`"),
        ({"exchange_s": 0.1}, "exchange", "waiting for gradients: use fewer processes"),
        ({"update_s": 0.2}, "update", "`parallel: zero`"),
        ({"rest_s": 0.2}, "rest", "on other code in the loop body"),
        ({"saving_s": 0.4}, "saving", "saving takes 25% of the run time"),
        ({"evaluating_s": 0.8}, "evaluating", "evaluation takes 50% of the run time"),
    ],
)
def test_a_phase_that_takes_long_on_all_ranks(tmp_path: Path, values: dict[str, float], about: str, text: str) -> None:
    (finding,) = run_findings(record_of(tmp_path, values, values))
    assert finding.about == about
    assert text in finding.text


@pytest.mark.parametrize(("machines", "is_advised"), [(None, False), (1, False), (2, True)])
def test_compression_is_advised_between_machines_only(tmp_path: Path, machines: int | None, is_advised: bool) -> None:
    """Within one machine it takes longer than it saves."""
    (finding,) = run_findings(record_of(tmp_path, {"exchange_s": 0.1}, {"exchange_s": 0.1}, machines=machines))
    assert ("compress" in finding.text) == is_advised


def test_a_phase_that_takes_long_on_one_rank_is_not_reported_for_all(tmp_path: Path) -> None:
    assert run_findings(record_of(tmp_path, {"data_s": 0.1, "compute_s": 0.01}, {})) == []


def test_steps_that_took_no_time_are_no_error(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("data_s", "compute_s", "exchange_s", "update_s", "elapsed_s"), 0.0)
    assert run_findings(record_of(tmp_path, nothing, nothing)) == []


def test_a_few_timed_steps_are_too_few(tmp_path: Path) -> None:
    record = record_of(tmp_path, {"data_s": 5.0}, steps=(10, 20))
    assert verdict_lines(record) == ["only 2 timed steps so far: too few to judge by"]
    empty = RunRecord(tmp_path / "none")
    assert verdict_lines(empty) == ["no step has been timed yet: only every `log_every`-th step is"]


def test_a_loss_that_is_not_finite_is_a_finding(tmp_path: Path) -> None:
    record = read_record(write_run(tmp_path, [start(), event("step", 10, loss=1.0), event("step", 20, loss="nan")]))
    assert verdict_lines(record) == ["loss was not finite at step 20"]
