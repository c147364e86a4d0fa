"""Measuring, in this process: what is timed, what is kept, and what becomes of a loop that fails."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.benchmark import measuring
from lockstep.benchmark.catalogue import CONTENDERS, HAND_WRITTEN, Entry, entries
from lockstep.benchmark.comparison import compare
from lockstep.benchmark.measuring import Measuring
from lockstep.benchmark.record import Record, Times
from lockstep.benchmark.task import Task
from lockstep.commands import bench_processes
from lockstep.commands.bench_processes import measure
from lockstep.engine.digest import digest
from lockstep.errors import LockstepError
from lockstep.world.world import World

OURS = [name for name in CONTENDERS if name not in ("accelerate", "fabric")]

DIED = "lockstep: rank 1 of 2 failed after step 3, the cause: killed by SIGKILL\nlockstep: its victims: rank 0\n"


def task(folder: Path, rows: list[Entry] | None = None) -> Task:
    folder.mkdir(parents=True, exist_ok=True)
    return Task("tiny", "cpu", 32, 3, 2, entries(OURS, {}, [1, 2]) if rows is None else rows, str(folder))


def test_a_task_travels_as_json(tmp_path: Path) -> None:
    assert Task.from_json(task(tmp_path).to_json()) == task(tmp_path)


def test_all_are_timed_in_every_round_and_none_disturbs_another(tmp_path: Path) -> None:
    told: list[str] = []
    Measuring(task(tmp_path / "a"), World(), told.append).measure()
    alone = entries(["fast"], {}, [])
    Measuring(task(tmp_path / "b", alone), World(), told.append).measure()
    assert told[:3] == ["first steps of 6 loops", "round 1 of 2", "round 2 of 2"]
    records = {1: Record(tmp_path / "a"), 2: Record(tmp_path / "b")}
    seconds = records[1].times().seconds
    assert list(seconds) == ["hand-written", "again", "dataloader", "lockstep-1", "lockstep-2", "fast"]
    assert all(len(values) == 2 and min(values) > 0 for values in seconds.values())
    assert records[1].times().num_parameters == 32 * 64 + 64 + 64 * 10 + 10
    for row in compare(alone, records, {}):  # whoever else is measured, and in whatever order
        assert row.answer is not None
        assert row.answer.is_same, row.entry.name
        assert row.answer.difference == 0.0
    by_hand, again, dataloader = (digest(records[1].weights(name)) for name in ("hand-written", "again", "dataloader"))
    assert by_hand == again
    assert by_hand != dataloader, "which shuffles in another way"


def test_weights_that_differ_are_told_by_how_much(tmp_path: Path) -> None:
    rows = entries([], {}, [])
    records = {}
    for size, folder in ((1, tmp_path / "a"), (2, tmp_path / "b")):
        Measuring(task(folder, rows), World(), lambda _: None).measure()
        records[size] = Record(folder)
    weights = records[2].weights("again")
    next(iter(weights.values()))[0] += 0.25
    records[2].keep_weights("again", weights)
    by_hand, again = compare(rows, records, {})
    assert by_hand.answer is not None and by_hand.answer.is_same
    assert again.answer is not None and not again.answer.is_same
    assert again.answer.difference == pytest.approx(0.25)
    assert records[1].failure() is records[2].failure() is None, "nobody is to blame for what comes after the last turn"
    records[2].keep_times(Times(1, {"hand-written": [1.0]}))
    _, failed = compare(rows, records, {"again": "no"})
    assert (list(failed.times), failed.answer, failed.failure) == ([1], None, "no"), "where it did not fail, it counts"


def breaking(error: Exception) -> Callable[[Any], Any]:
    def make(_: Any) -> Any:
        raise error

    return make


def test_a_loop_that_fails_leaves_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measuring.LOOPS, "fast", breaking(ImportError("no such thing\nat all")))
    assert Record(tmp_path).failure() is None
    with pytest.raises(ImportError):
        Measuring(task(tmp_path), World(), lambda _: None).measure()
    assert Record(tmp_path).failure() == ("fast", "ImportError: no such thing")
    monkeypatch.setitem(measuring.LOOPS, HAND_WRITTEN, breaking(RuntimeError()))
    with pytest.raises(RuntimeError):
        Measuring(task(tmp_path), World(), lambda _: None).measure()
    assert Record(tmp_path).failure() == ("fast", "ImportError: no such thing"), "who fails after it is its victim"


def test_the_others_go_on_without_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[list[str]] = []

    def run(asked: Task, processes: int, log: Path, *, quiet: bool) -> int:
        names = [entry.name for entry in asked.entries]
        tried.append(names)
        record = Record(Path(asked.folder))
        for name in names:
            record.begin_turn(name)
            if name in ("dataloader", "fast"):
                log.write_text("some words\n" + DIED * (name == "dataloader"))
                return 3
        return 0

    monkeypatch.setattr(bench_processes, "_run", run)
    failures = {"lockstep-1": "known before"}
    measure(task(tmp_path), 1, tmp_path, failures, quiet=False)
    assert tried[-1] == ["hand-written", "again", "lockstep-2"]
    assert len(tried) == 3
    assert failures == {
        "lockstep-1": "known before",
        "dataloader": "killed by SIGKILL",
        "fast": "ended with exit code 3",
    }
    assert "hand-written, with a DataLoader failed: the others begin again without it" in capsys.readouterr().out
    tried.clear()
    measure(task(tmp_path), 2, tmp_path, failures, quiet=True)
    assert tried == [["hand-written", "again", "lockstep-2"]], "what failed on one is not tried on two"


def test_without_the_hand_written_loop_there_is_nothing_to_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(asked: Task, processes: int, log: Path, *, quiet: bool) -> int:
        Record(Path(asked.folder)).begin_turn(HAND_WRITTEN)
        log.write_text("the cause\n")
        return 3

    monkeypatch.setattr(bench_processes, "_run", run)
    with pytest.raises(LockstepError, match=r"nothing could be measured on 2 processes \(exit code 3\):\nthe cause"):
        measure(task(tmp_path), 2, tmp_path, {}, quiet=True)
