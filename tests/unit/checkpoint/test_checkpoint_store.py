"""Checkpoints are committed whole or not at all, damaged ones are passed over, and pruning keeps the right ones."""

import json
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.checkpoint.checkpoint_store import (
    CheckpointStore,
    Retention,
    best_checkpoint,
    latest_checkpoint,
    load_weights,
)
from lockstep.checkpoint.manifest import CheckpointError
from tests.checkpoints import RUN_ID, save


def weights(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"x": torch.tensor([value])}}


def damage(checkpoint: Path, name: str = "model.safetensors") -> None:
    data = bytearray((checkpoint / name).read_bytes())
    data[-3] ^= 1
    (checkpoint / name).write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_saved_weights_load_unchanged(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    saved = save(tmp_path, 7, {"model": model.state_dict()}, {"metrics": {"loss": 1.0}})
    assert latest_checkpoint(tmp_path) == saved == tmp_path / "step-7"
    found = load_weights(saved)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert CheckpointStore(tmp_path).load(7).manifest.facts == {"metrics": {"loss": 1.0}}


def test_tied_and_strided_tensors(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    found = load_weights(save(tmp_path, 1, {"model": {"a": tensor, "b": tensor, "t": tensor.t()}}))
    assert torch.equal(found["b"], tensor)
    assert torch.equal(found["t"], tensor.t())


def test_the_newest_is_latest_and_a_step_can_be_saved_again(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    for step, value in ((1, 1.0), (2, 2.0), (2, 3.0)):
        save(tmp_path, step, weights(value))
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert load_weights(latest)["x"].item() == 3.0
    assert names(tmp_path) == ["LATEST", "step-1", "step-2"]
    assert (tmp_path / "LATEST").read_text() == f"step-2 {CheckpointStore(tmp_path).manifest(2).commit}\n"


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step, weights(step))
    assert CheckpointStore(tmp_path).steps() == [100, 10, 9]


def test_only_the_owner_can_read_a_checkpoint(tmp_path: Path) -> None:
    saved = save(tmp_path / "checkpoints", 1, weights(1))
    for path in (saved.parent, saved, *saved.iterdir(), saved.parent / "LATEST"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_the_manifest_is_strict_json(tmp_path: Path) -> None:
    saved = save(tmp_path, 1, {"model": {"x": torch.ones(1), "loss": float("nan")}})
    text = (saved / "manifest.json").read_text()
    content = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert content["forms"]["model"]["loss"] == {"$float": "nan"}


def test_damaged_checkpoints_are_named_and_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, weights(step))
    damage(tmp_path / "step-3")
    (tmp_path / "step-2" / "manifest.json").unlink()
    problems: list[str] = []
    found = CheckpointStore(tmp_path).newest_intact(RUN_ID, problems.append)
    assert found is not None
    assert found.manifest.step == 1
    assert problems == [
        f"{tmp_path}/step-3: model.safetensors does not match its hash",
        f"{tmp_path}/step-2: manifest.json cannot be read: No such file or directory",
    ]
    with pytest.raises(CheckpointError, match="does not match its hash"):
        load_weights(tmp_path / "step-3")


def test_a_checkpoint_of_another_run_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1, weights(1))
    save(tmp_path, 2, weights(2), run_id="f" * 16)
    problems: list[str] = []
    found = CheckpointStore(tmp_path).newest_intact(RUN_ID, problems.append)
    assert found is not None
    assert found.manifest.step == 1
    assert "belongs to another run" in problems[0]


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    saved = save(tmp_path, 1, weights(1))
    with pytest.raises(CheckpointError, match=r"has no average\.safetensors; it has model\.safetensors"):
        load_weights(saved, "average")


class TestPruning:
    def test_it_keeps_the_newest_the_best_and_every_tenth(self, tmp_path: Path) -> None:
        for step in range(1, 26):
            save(tmp_path, step, weights(step), is_best=step in (3, 7), retention=Retention(2, keep_every=10))
        assert CheckpointStore(tmp_path).steps() == [25, 24, 20, 10, 7]

    def test_it_keeps_what_was_just_saved_beside_a_later_damaged_one(self, tmp_path: Path) -> None:
        save(tmp_path, 2, weights(2))
        damage(save(tmp_path, 6, weights(6)))
        save(tmp_path, 4, weights(4), retention=Retention(1))
        assert CheckpointStore(tmp_path).steps() == [6, 4]
        found = CheckpointStore(tmp_path).newest_intact(RUN_ID, lambda _: None)
        assert found is not None
        assert found.manifest.step == 4

    def test_an_unreadable_manifest_does_not_stop_it(self, tmp_path: Path) -> None:
        for step in (1, 2, 3):
            save(tmp_path, step, weights(step), is_best=step == 1)
        damage(tmp_path / "step-2", "manifest.json")
        save(tmp_path, 4, weights(4), retention=Retention(1))
        assert CheckpointStore(tmp_path).steps() == [4, 1]


class TestBest:
    def test_it_is_the_newest_that_was_saved_as_best(self, tmp_path: Path) -> None:
        assert best_checkpoint(tmp_path) is None
        for step in (1, 2, 3):
            save(tmp_path, step, weights(step), is_best=step < 3)
        assert best_checkpoint(tmp_path) == tmp_path / "step-2"
        assert (tmp_path / "BEST").read_text() == f"step-2 {CheckpointStore(tmp_path).manifest(2).commit}\n"

    def test_a_step_that_is_saved_again_stays_the_best(self, tmp_path: Path) -> None:
        save(tmp_path, 1, weights(1), is_best=True)
        save(tmp_path, 1, weights(2))
        assert CheckpointStore(tmp_path).best() == 1

    def test_an_outdated_pointer_is_ignored(self, tmp_path: Path) -> None:
        save(tmp_path, 1, weights(1), is_best=True)
        behind = (tmp_path / "BEST").read_bytes()
        save(tmp_path, 2, weights(2), is_best=True)
        (tmp_path / "BEST").write_bytes(behind)
        assert CheckpointStore(tmp_path).best() == 2

    def test_the_pointer_decides_if_a_later_manifest_cannot_be_read(self, tmp_path: Path) -> None:
        for step in (1, 2):
            save(tmp_path, step, weights(step), is_best=step == 1)
        damage(tmp_path / "step-2", "manifest.json")
        assert CheckpointStore(tmp_path).best() == 1
        (tmp_path / "BEST").unlink()
        with pytest.raises(CheckpointError, match="step-2"):
            CheckpointStore(tmp_path).best()


class TestTidying:
    def test_leftovers_of_killed_processes_are_removed(self, tmp_path: Path) -> None:
        save(tmp_path, 1, weights(1))
        for name in (".draft-step-2-1-1", ".removed-step-0-7", ".replaced-step-1"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").write_bytes(b"torn")
        (tmp_path / ".LATEST.draft").write_bytes(b"st")
        CheckpointStore(tmp_path).tidy()
        assert names(tmp_path) == ["LATEST", "step-1"]

    def test_a_checkpoint_whose_replacement_was_killed_is_used_and_restored(self, tmp_path: Path) -> None:
        saved = save(tmp_path, 1, weights(1))
        saved.rename(tmp_path / ".replaced-step-1")
        store = CheckpointStore(tmp_path)
        assert store.load(1).values["model"]["x"].item() == 1
        store.tidy()
        assert names(tmp_path) == ["LATEST", "step-1"]

    def test_a_missing_folder_is_empty(self, tmp_path: Path) -> None:
        CheckpointStore(tmp_path / "none").tidy()
        assert CheckpointStore(tmp_path / "none").steps() == []
