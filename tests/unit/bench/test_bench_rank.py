"""Timing all contenders in this process: what is timed and saved, and what is recorded of a loop that fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.bench import bench_rank
from lockstep.bench.bench_rank import BenchRank
from lockstep.bench.bench_record import BenchRecord, BenchTask, BenchTimes
from lockstep.bench.contenders import CONTENDERS, HAND_WRITTEN, Contender, make_contenders
from lockstep.bench.step_comparison import compare_contenders
from lockstep.engine.state_digest import digest
from lockstep.world.world import World

OURS = [name for name in CONTENDERS if name not in ("accelerate", "fabric")]


def task(folder: Path, rows: list[Contender] | None = None) -> BenchTask:
    folder.mkdir(parents=True, exist_ok=True)
    return BenchTask("tiny", "cpu", 32, 3, 2, make_contenders(OURS, {}, [1, 2]) if rows is None else rows, str(folder))


def test_a_task_survives_json(tmp_path: Path) -> None:
    assert BenchTask.from_json(task(tmp_path).to_json()) == task(tmp_path)


def test_every_contender_is_timed_in_every_round_and_disturbs_no_other(tmp_path: Path) -> None:
    reported: list[str] = []
    BenchRank(task(tmp_path / "a"), World(), reported.append).measure()
    alone = make_contenders(["fast"], {}, [])
    BenchRank(task(tmp_path / "b", alone), World(), reported.append).measure()
    assert reported[:3] == ["first steps of 6 loops", "round 1 of 2", "round 2 of 2"]
    records = {1: BenchRecord(tmp_path / "a"), 2: BenchRecord(tmp_path / "b")}
    seconds = records[1].times().seconds
    assert list(seconds) == ["hand-written", "again", "dataloader", "lockstep-1", "lockstep-2", "fast"]
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    assert records[1].times().num_parameters == 32 * 64 + 64 + 64 * 10 + 10
    rows = compare_contenders(alone, records, {})
    assert [row.contender.name for row in rows] == ["hand-written", "again", "fast"]
    for row in rows:  # whatever else is measured, and in whatever order
        assert row.weights is not None
        assert row.weights.is_same, row.contender.name
        assert row.weights.difference == 0.0
    by_hand, again, dataloader = (digest(records[1].weights(name)) for name in ("hand-written", "again", "dataloader"))
    assert by_hand == again
    assert by_hand != dataloader, "it shuffles in another way"


def test_the_difference_between_weights_is_measured(tmp_path: Path) -> None:
    rows = make_contenders([], {}, [])
    records = {}
    for size, folder in ((1, tmp_path / "a"), (2, tmp_path / "b")):
        BenchRank(task(folder, rows), World(), lambda _: None).measure()
        records[size] = BenchRecord(folder)
    weights = records[2].weights("again")
    next(iter(weights.values()))[0] += 0.25
    records[2].write_weights("again", weights)
    by_hand, again = compare_contenders(rows, records, {})
    assert by_hand.weights is not None and by_hand.weights.is_same
    assert again.weights is not None and not again.weights.is_same
    assert again.weights.difference == pytest.approx(0.25)
    assert records[1].failure() is records[2].failure() is None, "after the last turn, no contender is to blame"
    records[2].write_times(BenchTimes(1, {"hand-written": [1.0]}))
    _, failed = compare_contenders(rows, records, {"again": "no"})
    assert (list(failed.times), failed.weights, failed.failure) == ([1], None, "no"), (
        "times are kept where it did not fail"
    )


def breaking(error: Exception) -> Callable[[Any], Any]:
    def make(_: Any) -> Any:
        raise error

    return make


def test_the_first_loop_that_fails_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench_rank.LOOPS, "fast", breaking(ImportError("no such thing\nat all")))
    assert BenchRecord(tmp_path).failure() is None
    with pytest.raises(ImportError):
        BenchRank(task(tmp_path), World(), lambda _: None).measure()
    assert BenchRecord(tmp_path).failure() == ("fast", "ImportError: no such thing")
    monkeypatch.setitem(bench_rank.LOOPS, HAND_WRITTEN, breaking(RuntimeError()))
    with pytest.raises(RuntimeError):
        BenchRank(task(tmp_path), World(), lambda _: None).measure()
    assert BenchRecord(tmp_path).failure() == ("fast", "ImportError: no such thing"), "later failures follow from it"
