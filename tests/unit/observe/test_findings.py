"""What stands out is said in plain words, and where nothing does, that is said."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.observe.findings import findings, verdict
from lockstep.observe.record import Record, read_record
from tests.run_folders import event, start, timed, write_run

STEPS = (10, 20, 30, 40)


def record_of(folder: Path, *ranks: dict[str, Any], steps: tuple[int, ...] = STEPS) -> Record:
    lines = {rank: [timed(step, **values) for step in steps] for rank, values in enumerate(ranks)}
    return read_record(write_run(folder, [start(processes=len(ranks))], lines))


def test_nothing_stands_out(tmp_path: Path) -> None:
    record = record_of(tmp_path, {}, {})
    assert findings(record) == []
    assert verdict(record) == ["nothing stands out"]


def test_the_slow_rank_is_named_with_what_it_costs(tmp_path: Path) -> None:
    record = record_of(tmp_path, {"exchange_s": 0.13}, {"compute_s": 0.21}, {"exchange_s": 0.13})
    (finding,) = findings(record)
    assert finding.about == "straggler"
    assert finding.text == (
        "rank 1 is slow: its forward and backward pass takes 210.0 ms there and 100.0 ms on the others, "
        "which wait 110.0 ms of every step for it"
    )


def test_those_who_wait_for_a_slow_rank_are_not_told_to_be_fewer(tmp_path: Path) -> None:
    record = record_of(tmp_path, {"exchange_s": 0.3}, {"compute_s": 0.21, "exchange_s": 0.15})
    assert [finding.about for finding in findings(record)] == ["straggler"]


def test_more_lanes_are_given_as_the_reason(tmp_path: Path) -> None:
    record = record_of(tmp_path, {"exchange_s": 0.07}, {"compute_s": 0.15, "num_lanes": 3})
    (finding,) = findings(record)
    assert "it has 3 lanes where the other has 2" in finding.text
    assert "`lanes_per_rank`" in finding.text


def test_who_works_longer_but_waits_as_long_holds_up_nobody(tmp_path: Path) -> None:
    assert findings(record_of(tmp_path, {"compute_s": 0.13}, {})) == []


@pytest.mark.parametrize(
    ("values", "about", "words"),
    [
        ({"data_s": 0.1}, "data", "waiting for data: raise `workers`"),
        ({"exchange_s": 0.1}, "exchange", "waiting for gradients: fewer processes"),
        ({"update_s": 0.2}, "update", "`parallel: zero`"),
        ({"rest_s": 0.2}, "rest", "the rest of the loop's body"),
        ({"saving_s": 0.4}, "saving", "saving takes 25 % of all time"),
        ({"evaluating_s": 0.8}, "evaluating", "evaluating takes 50 % of all time"),
    ],
)
def test_what_all_ranks_spend_much_on(tmp_path: Path, values: dict[str, float], about: str, words: str) -> None:
    (finding,) = findings(record_of(tmp_path, values, values))
    assert finding.about == about
    assert words in finding.text


def test_what_one_rank_alone_waits_for_is_not_said_of_all(tmp_path: Path) -> None:
    assert findings(record_of(tmp_path, {"data_s": 0.1, "compute_s": 0.01}, {})) == []


def test_steps_that_took_no_time_are_no_trouble(tmp_path: Path) -> None:
    nothing = dict.fromkeys(("data_s", "compute_s", "exchange_s", "update_s", "elapsed_s"), 0.0)
    assert findings(record_of(tmp_path, nothing, nothing)) == []


def test_a_few_timed_steps_are_too_few(tmp_path: Path) -> None:
    record = record_of(tmp_path, {"data_s": 5.0}, steps=(10, 20))
    assert verdict(record) == ["2 timed steps: too few to judge by"]
    assert verdict(Record(tmp_path / "none")) == ["no step was timed yet: it is every `log_every`-th one"]


def test_a_loss_that_is_no_number_is_told_first(tmp_path: Path) -> None:
    record = read_record(write_run(tmp_path, [start(), event("step", 10, loss=1.0), event("step", 20, loss="nan")]))
    assert verdict(record) == ["loss was not a finite number at step 20"]
