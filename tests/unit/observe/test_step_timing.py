"""The timing of each rank: medians, shares, and which rank holds up the others."""

import json
from pathlib import Path
from typing import Any

import pytest

from lockstep.events.run_folder import RunFolder
from lockstep.observe.step_timing import find_straggler, read_rank_times


def line(step: int, *, attempt: int = 1, **values: Any) -> dict[str, Any]:
    times = {"data_s": 0.01, "compute_s": 0.1, "exchange_s": 0.02, "update_s": 0.03, "rest_s": 0.0}
    others = {"saving_s": 0.0, "evaluating_s": 0.0, "elapsed_s": 1.6, "num_steps": 10, "num_lanes": 2}
    return {"t": 0.0, "attempt": attempt, "step": step, "kind": "step", **times, **others, **values}


def write(folder: Path, ranks: dict[int, list[dict[str, Any]]]) -> RunFolder:
    (folder / "ranks").mkdir(exist_ok=True)
    for rank, lines in ranks.items():
        text = "".join(json.dumps(each) + "\n" for each in lines)
        (folder / "ranks" / f"{rank}.jsonl").write_text(text)
    return RunFolder(folder)


def test_medians_omit_the_first_step_and_shares_are_of_the_run_time(tmp_path: Path) -> None:
    lines = [
        line(10, compute_s=9.0),
        line(20, compute_s=0.1, saving_s=0.4),
        line(30, compute_s=0.3),
        line(40, compute_s=0.2),
    ]
    (times,) = read_rank_times(write(tmp_path, {0: lines}))
    assert (times.num_timed, times.phases["compute"]) == (3, 0.2)
    assert times.saving == pytest.approx(0.4 / 4.8)
    assert times.steps_per_s == pytest.approx(30 / 4.8)
    assert times.step_s == pytest.approx(0.26)
    assert (times.travel_s, times.hidden) == (None, None)


def test_only_the_newest_attempt_counts(tmp_path: Path) -> None:
    earlier = [line(step, compute_s=5.0) for step in (10, 20, 30)]
    later = [line(step, attempt=2) for step in (20, 30, 40)]
    (times,) = read_rank_times(write(tmp_path, {0: earlier + later, 1: earlier}))
    assert (times.rank, times.num_timed, times.phases["compute"]) == (0, 2, 0.1)


def test_invalid_and_incomplete_lines_are_skipped(tmp_path: Path) -> None:
    folder = write(tmp_path, {0: [line(10), line(20, compute_s="NaN"), {"kind": "checkpoint"}, line(30)]})
    with (tmp_path / "ranks" / "0.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    (times,) = read_rank_times(folder)
    assert times.num_timed == 2


def test_hidden_is_the_share_of_communication_that_was_not_waited_for(tmp_path: Path) -> None:
    (times,) = read_rank_times(write(tmp_path, {0: [line(10, travel_s=0.08, sent_bytes=4000)]}))
    assert times.hidden == pytest.approx(0.75)
    assert times.sent_bytes == 4000


def ranks_of(folder: Path, **slow: float) -> RunFolder:
    quick = [line(step, exchange_s=0.12) for step in (10, 20, 30)]
    return write(folder, {0: quick, 1: [line(step, **slow) for step in (10, 20, 30)], 2: quick})


def test_the_straggler_is_the_rank_that_works_longest_not_the_one_that_waits_longest(tmp_path: Path) -> None:
    straggler = find_straggler(read_rank_times(ranks_of(tmp_path, compute_s=0.2)))
    assert straggler is not None
    assert (straggler.rank, straggler.phase) == (1, "compute")
    assert straggler.held_up_s == pytest.approx(0.1)
    assert (straggler.seconds, straggler.others_s) == (0.2, 0.1)


def test_a_straggler_may_be_waiting_for_data(tmp_path: Path) -> None:
    straggler = find_straggler(read_rank_times(ranks_of(tmp_path, data_s=0.3)))
    assert straggler is not None
    assert straggler.phase == "data"


def test_a_slightly_slower_rank_is_not_a_straggler(tmp_path: Path) -> None:
    assert find_straggler(read_rank_times(ranks_of(tmp_path, compute_s=0.11))) is None
    assert find_straggler(read_rank_times(ranks_of(tmp_path))[:1]) is None
