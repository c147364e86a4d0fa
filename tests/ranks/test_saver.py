"""Saving on several ranks: the work is shared, the outcome is agreed on, and training does not wait."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint import saver as saving
from lockstep.checkpoint.contents import digest_of, state_in
from lockstep.checkpoint.manifest import StoredFile
from lockstep.checkpoint.saver import Content, Outcome, Saver
from lockstep.checkpoint.store import Retention, Store
from lockstep.testing import ranks
from lockstep.world.collectives import barrier
from lockstep.world.plain_values import Shard, split
from lockstep.world.world import World
from tests.checkpoints import RUN_ID

KEEP = Retention(100)
SIZES = {"model": 1000, "optimizer": 2000, "average": 900, "kept.small": 10}


def whole_parts(salt: int = 0) -> dict[str, Any]:
    parts: dict[str, Any] = {name: {"x": torch.arange(size) + salt} for name, size in SIZES.items()}
    parts["optimizer"] = {"state": {"x": parts["optimizer"]}}
    return parts


def saved(saver: Saver, step: int, parts: Mapping[str, Any], *, is_best: bool = False) -> Outcome:
    saver.save(Content(step, parts, {"step": step}, is_best), KEEP)
    outcome = saver.wait()
    assert outcome is not None
    return outcome


def save_whole(world: World, folder: str) -> Outcome:
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)
    outcome = saved(saver, 1, whole_parts())
    saver.close()
    return outcome


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_saves_the_same(tmp_path: Path, size: int) -> None:
    outcomes = ranks(size).run(save_whole, str(tmp_path))
    assert len({outcome.commit for outcome in outcomes}) == 1
    assert all(outcome.problem is None and outcome.num_bytes == outcomes[0].num_bytes for outcome in outcomes)
    found = Store(tmp_path).load(1)
    assert digest_of(found.values) == digest_of(whole_parts())
    assert sorted(found.manifest.files) == sorted(f"{name}.safetensors" for name in SIZES)


def own_files(world: World, folder: str) -> list[str]:
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)
    files = saver._own_files({part: split(value) for part, value in whole_parts().items()})
    saver.close()
    return sorted(files)


def test_the_files_are_shared_out_by_size(tmp_path: Path) -> None:
    first, second = ranks(2).run(own_files, str(tmp_path))
    assert first == ["optimizer.safetensors"]
    assert second == ["average.safetensors", "kept.small.safetensors", "model.safetensors"]


def sharded_parts(world: World) -> dict[str, Any]:
    """Rows of one tensor, columns of another, and a whole one."""
    rows, columns = torch.arange(24.0).view(6, 4), torch.arange(12).view(2, 6)
    first, past = 6 * world.rank // world.size, 6 * (world.rank + 1) // world.size
    return {
        "model": {"whole": torch.ones(3)},
        "kept.cut": {
            "rows": Shard(rows[first:past], (first, 0), (6, 4)),
            "columns": [Shard(columns[:, first:past], (0, first), (2, 6))],
            "words": "whole",
        },
    }


def save_sharded(world: World, folder: str) -> Outcome:
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)
    outcome = saved(saver, world.size, sharded_parts(world))
    saver.close()
    return outcome


def load_sharded(world: World, folder: str) -> list[tuple[int, bool]]:
    found = []
    for step in Store(Path(folder)).steps():
        values = Store(Path(folder)).load(step).values
        cut = values["kept.cut"]
        is_whole = torch.equal(cut["rows"], torch.arange(24.0).view(6, 4)) and torch.equal(
            cut["columns"][0], torch.arange(12).view(2, 6)
        )
        found.append(
            (step, is_whole and cut["words"] == "whole" and torch.equal(values["model"]["whole"], torch.ones(3)))
        )
    return found


def test_shards_of_any_number_of_ranks_are_whole_for_any_other(tmp_path: Path) -> None:
    for size in (1, 2, 3):
        ranks(size).run(save_sharded, str(tmp_path))
    assert sorted(Store(tmp_path).load(3).manifest.files) == [
        "kept.cut.rank-0.safetensors",
        "kept.cut.rank-1.safetensors",
        "kept.cut.rank-2.safetensors",
        "model.safetensors",
    ]
    for size in (1, 2):
        assert ranks(size).run(load_sharded, str(tmp_path)) == [[(3, True), (2, True), (1, True)]] * size


def save_three_times(world: World, folder: str, hindered: int, hindrance: str) -> list[Outcome]:
    """The second save cannot be written by one rank."""
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)
    outcomes = [saved(saver, 1, whole_parts(1))]
    draft = saver.store.draft(2, "1-2")
    if world.rank == 0:
        if hindrance == "a folder in the file's place":
            own = "model.safetensors" if hindered == 1 else "optimizer.safetensors"
            (draft / own / "inner").mkdir(parents=True)
        elif hindrance == "a file in the draft's place":
            draft.touch()
        elif hindrance == "a manifest that is there":
            draft.mkdir()
            (draft / "manifest.json").touch()
    barrier()
    parts = whole_parts(2)
    if hindrance == "a value that no file can hold" and world.rank == hindered:
        parts["kept.small"] = {"x": torch.ones(2).to(torch.complex128)}
        parts["model"] = {"x": torch.ones(1000, dtype=torch.complex128)}
    outcomes.append(saved(saver, 2, parts))
    outcomes.append(saved(saver, 3, whole_parts(3)))
    saver.close()
    return outcomes


@pytest.mark.parametrize(
    ("hindered", "hindrance"),
    [
        (0, "a folder in the file's place"),
        (1, "a folder in the file's place"),
        (0, "a file in the draft's place"),
        (0, "a manifest that is there"),
        (1, "a value that no file can hold"),
    ],
)
def test_a_save_that_one_rank_cannot_make_has_failed_for_all(tmp_path: Path, hindered: int, hindrance: str) -> None:
    first, second = ranks(2).run(save_three_times, str(tmp_path), hindered, hindrance)
    assert first == second
    good, failed, again = first
    assert good.problem is None
    assert failed.commit is None
    assert failed.problem
    assert "\n" not in failed.problem
    if "manifest" not in hindrance:
        assert f"rank {hindered}: " in failed.problem
    assert again.problem is None
    store = Store(tmp_path)
    assert store.steps() == [3, 1]
    assert digest_of(store.load(1).values) == digest_of(whole_parts(1))
    assert digest_of(store.load(3).values) == digest_of(whole_parts(3))
    assert {path.name for path in tmp_path.iterdir()} == {"LATEST", "step-1", "step-3"}


def fail_after_the_commit(world: World, folder: str) -> Outcome:
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)

    def refuse(_: object) -> None:
        raise ValueError("planted")

    saver.save(Content(1, whole_parts(), {}), KEEP, refuse)
    outcome = saver.wait()
    saver.close()
    assert outcome is not None
    return outcome


def test_what_goes_wrong_after_the_commit_does_not_undo_it(tmp_path: Path) -> None:
    first, second = ranks(2).run(fail_after_the_commit, str(tmp_path))
    assert first == second
    assert first.commit == Store(tmp_path).load(1).manifest.commit
    assert first.problem == "ValueError: planted"


def go_on_while_it_is_written(world: World, folder: str) -> tuple[list[str], bool, Outcome]:
    """The thread that writes is held up; training goes on meanwhile, and changes everything."""
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)
    parts = whole_parts(1)
    may_write = threading.Event()
    write = saving.write_tensors

    def held_up(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
        assert may_write.wait(30)
        return write(path, tensors)

    saving.write_tensors = held_up  # type: ignore[attr-defined]
    try:
        saver.save(Content(1, parts, {}), KEEP)
        for tensor in state_in(parts).values():
            tensor.zero_()
        parts["kept.small"]["x"].zero_()
        barrier()  # training's own collectives are not the save's
        found = [path.name for path in Path(folder).glob("**/*.safetensors")]
        is_under_way = saver.news() is None
        with pytest.raises(AssertionError, match="comes before"):
            saver.save(Content(2, parts, {}), KEEP)  # there would be a second copy
        barrier()
        may_write.set()
        outcome = saver.wait()
    finally:
        saving.write_tensors = write  # type: ignore[attr-defined]
    saver.close()
    assert outcome is not None
    return found, is_under_way, outcome


def test_training_goes_on_while_a_save_is_written(tmp_path: Path) -> None:
    for found, is_under_way, outcome in ranks(2).run(go_on_while_it_is_written, str(tmp_path)):
        assert found == []
        assert is_under_way
        assert outcome.problem is None
    values = Store(tmp_path).load(1).values
    assert digest_of(values) == digest_of(whole_parts(1))
    assert torch.equal(values["kept.small"]["x"], whole_parts(1)["kept.small"]["x"])
