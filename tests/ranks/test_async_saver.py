"""Saving on several ranks: they share the work, agree on the outcome, and training does not wait."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.checkpoint import async_saver
from lockstep.checkpoint.async_saver import SaveContent, SaveOutcome, Saver
from lockstep.checkpoint.checkpoint_contents import checkpoint_digest, trained_state
from lockstep.checkpoint.checkpoint_store import CheckpointStore, Retention
from lockstep.checkpoint.manifest import StoredFile
from lockstep.testing import ranks
from lockstep.world.collectives import barrier
from lockstep.world.serialization import Shard, split_values
from lockstep.world.world import World
from tests.checkpoints import RUN_ID

KEEP = Retention(100)
SIZES = {"model": 1000, "optimizer": 2000, "average": 900, "kept.small": 10}


def whole_parts(offset: int = 0) -> dict[str, Any]:
    parts: dict[str, Any] = {name: {"x": torch.arange(size) + offset} for name, size in SIZES.items()}
    parts["optimizer"] = {"state": {"x": parts["optimizer"]}}
    return parts


def save_and_wait(saver: Saver, step: int, parts: Mapping[str, Any], *, is_best: bool = False) -> SaveOutcome:
    saver.save(SaveContent(step, parts, {"step": step}, is_best), KEEP)
    outcome = saver.wait()
    assert outcome is not None
    return outcome


def save_whole(world: World, folder: str) -> SaveOutcome:
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)
    outcome = save_and_wait(saver, 1, whole_parts())
    saver.close()
    return outcome


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_saves_the_same(tmp_path: Path, size: int) -> None:
    outcomes = ranks(size).run(save_whole, str(tmp_path))
    assert len({outcome.commit for outcome in outcomes}) == 1
    assert all(outcome.problem is None and outcome.num_bytes == outcomes[0].num_bytes for outcome in outcomes)
    found = CheckpointStore(tmp_path).load(1)
    assert checkpoint_digest(found.values) == checkpoint_digest(whole_parts())
    assert sorted(found.manifest.files) == sorted(f"{name}.safetensors" for name in SIZES)


def own_files(world: World, folder: str) -> list[str]:
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)
    files = saver._own_files({part: split_values(value) for part, value in whole_parts().items()})
    saver.close()
    return sorted(files)


def test_files_are_assigned_to_ranks_by_size(tmp_path: Path) -> None:
    first, second = ranks(2).run(own_files, str(tmp_path))
    assert first == ["optimizer.safetensors"]
    assert second == ["average.safetensors", "kept.small.safetensors", "model.safetensors"]


def sharded_parts(world: World) -> dict[str, Any]:
    """Rows of one tensor, columns of another, and a whole one."""
    rows, columns = torch.arange(24.0).view(6, 4), torch.arange(12).view(2, 6)
    first, past = 6 * world.rank // world.size, 6 * (world.rank + 1) // world.size
    return {
        "model": {"whole": torch.ones(3)},
        "kept.sharded": {
            "rows": Shard(rows[first:past], (first, 0), (6, 4)),
            "columns": [Shard(columns[:, first:past], (0, first), (2, 6))],
            "words": "whole",
        },
    }


def save_sharded(world: World, folder: str) -> SaveOutcome:
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)
    outcome = save_and_wait(saver, world.size, sharded_parts(world))
    saver.close()
    return outcome


def load_sharded(world: World, folder: str) -> list[tuple[int, bool]]:
    found = []
    for step in CheckpointStore(Path(folder)).steps():
        values = CheckpointStore(Path(folder)).load(step).values
        sharded = values["kept.sharded"]
        is_whole = torch.equal(sharded["rows"], torch.arange(24.0).view(6, 4)) and torch.equal(
            sharded["columns"][0], torch.arange(12).view(2, 6)
        )
        found.append(
            (step, is_whole and sharded["words"] == "whole" and torch.equal(values["model"]["whole"], torch.ones(3)))
        )
    return found


def test_shards_saved_by_any_number_of_ranks_load_whole_on_any_other(tmp_path: Path) -> None:
    for size in (1, 2, 3):
        ranks(size).run(save_sharded, str(tmp_path))
    assert sorted(CheckpointStore(tmp_path).load(3).manifest.files) == [
        "kept.sharded.rank-0.safetensors",
        "kept.sharded.rank-1.safetensors",
        "kept.sharded.rank-2.safetensors",
        "model.safetensors",
    ]
    for size in (1, 2):
        assert ranks(size).run(load_sharded, str(tmp_path)) == [[(3, True), (2, True), (1, True)]] * size


def save_three_times(world: World, folder: str, failing_rank: int, obstacle: str) -> list[SaveOutcome]:
    """Save three times; one rank cannot write its files of the second save."""
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)
    outcomes = [save_and_wait(saver, 1, whole_parts(1))]
    draft = saver.store.draft(2, "1-2")
    if world.rank == 0:
        if obstacle == "a folder in the file's place":
            own = "model.safetensors" if failing_rank == 1 else "optimizer.safetensors"
            (draft / own / "inner").mkdir(parents=True)
        elif obstacle == "a file in the draft's place":
            draft.touch()
        elif obstacle == "a manifest that is there":
            draft.mkdir()
            (draft / "manifest.json").touch()
    barrier()
    parts = whole_parts(2)
    if obstacle == "a value that no file can hold" and world.rank == failing_rank:
        parts["kept.small"] = {"x": torch.ones(2).to(torch.complex128)}
        parts["model"] = {"x": torch.ones(1000, dtype=torch.complex128)}
    outcomes.append(save_and_wait(saver, 2, parts))
    outcomes.append(save_and_wait(saver, 3, whole_parts(3)))
    saver.close()
    return outcomes


@pytest.mark.parametrize(
    ("failing_rank", "obstacle"),
    [
        (0, "a folder in the file's place"),
        (1, "a folder in the file's place"),
        (0, "a file in the draft's place"),
        (0, "a manifest that is there"),
        (1, "a value that no file can hold"),
    ],
)
def test_a_save_that_fails_on_one_rank_has_failed_on_all(tmp_path: Path, failing_rank: int, obstacle: str) -> None:
    first, second = ranks(2).run(save_three_times, str(tmp_path), failing_rank, obstacle)
    assert first == second
    good, failed, again = first
    assert good.problem is None
    assert failed.commit is None
    assert failed.problem
    assert "\n" not in failed.problem
    if "manifest" not in obstacle:
        assert f"rank {failing_rank}: " in failed.problem
    assert again.problem is None
    store = CheckpointStore(tmp_path)
    assert store.steps() == [3, 1]
    assert checkpoint_digest(store.load(1).values) == checkpoint_digest(whole_parts(1))
    assert checkpoint_digest(store.load(3).values) == checkpoint_digest(whole_parts(3))
    assert {path.name for path in tmp_path.iterdir()} == {"LATEST", "step-1", "step-3"}


def fail_after_the_commit(world: World, folder: str) -> SaveOutcome:
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)

    def refuse(_: object) -> None:
        raise ValueError("planted")

    saver.save(SaveContent(1, whole_parts(), {}), KEEP, refuse)
    outcome = saver.wait()
    saver.close()
    assert outcome is not None
    return outcome


def test_a_problem_after_the_commit_does_not_undo_it(tmp_path: Path) -> None:
    first, second = ranks(2).run(fail_after_the_commit, str(tmp_path))
    assert first == second
    assert first.commit == CheckpointStore(tmp_path).load(1).manifest.commit
    assert first.problem == "ValueError: planted"


def train_while_saving(world: World, folder: str) -> tuple[list[str], bool, SaveOutcome]:
    """Delay the thread that writes while training continues and changes all tensors."""
    saver = Saver(Path(folder), world, RUN_ID, attempt=1)
    parts = whole_parts(1)
    may_write = threading.Event()
    write = async_saver.write_tensors

    def delayed(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
        assert may_write.wait(30)
        return write(path, tensors)

    async_saver.write_tensors = delayed  # type: ignore[attr-defined]
    try:
        saver.save(SaveContent(1, parts, {}), KEEP)
        for tensor in trained_state(parts).values():
            tensor.zero_()
        parts["kept.small"]["x"].zero_()
        barrier()  # collectives of training do not interfere with those of the save
        found = [path.name for path in Path(folder).glob("**/*.safetensors")]
        is_in_progress = saver.poll() is None
        with pytest.raises(AssertionError, match="comes before"):
            saver.save(SaveContent(2, parts, {}), KEEP)  # it would need a second copy
        barrier()
        may_write.set()
        outcome = saver.wait()
    finally:
        async_saver.write_tensors = write  # type: ignore[attr-defined]
    saver.close()
    assert outcome is not None
    return found, is_in_progress, outcome


def test_training_continues_while_a_save_is_written(tmp_path: Path) -> None:
    for found, is_in_progress, outcome in ranks(2).run(train_while_saving, str(tmp_path)):
        assert found == []
        assert is_in_progress
        assert outcome.problem is None
    values = CheckpointStore(tmp_path).load(1).values
    assert checkpoint_digest(values) == checkpoint_digest(whole_parts(1))
    assert torch.equal(values["kept.small"]["x"], whole_parts(1)["kept.small"]["x"])
