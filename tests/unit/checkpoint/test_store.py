"""A checkpoint is there whole or not at all, a damaged one is passed over, and only what may go is pruned."""

import json
import stat
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.checkpoint.manifest import CheckpointError
from lockstep.checkpoint.store import Retention, Store, best_checkpoint, latest_checkpoint, load_weights
from tests.checkpoints import RUN_ID, save


def weights(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"x": torch.tensor([value])}}


def damage(checkpoint: Path, name: str = "model.safetensors") -> None:
    data = bytearray((checkpoint / name).read_bytes())
    data[-3] ^= 1
    (checkpoint / name).write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    saved = save(tmp_path, 7, {"model": model.state_dict()}, {"metrics": {"loss": 1.0}})
    assert latest_checkpoint(tmp_path) == saved == tmp_path / "step-7"
    found = load_weights(saved)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert Store(tmp_path).load(7).manifest.facts == {"metrics": {"loss": 1.0}}


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
    assert (tmp_path / "LATEST").read_text() == f"step-2 {Store(tmp_path).manifest(2).commit}\n"


def test_steps_are_ordered_as_numbers(tmp_path: Path) -> None:
    for step in (9, 10, 100):
        save(tmp_path, step, weights(step))
    assert Store(tmp_path).steps() == [100, 10, 9]


def test_only_their_owner_may_read_them(tmp_path: Path) -> None:
    saved = save(tmp_path / "checkpoints", 1, weights(1))
    for path in (saved.parent, saved, *saved.iterdir(), saved.parent / "LATEST"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_the_manifest_is_strict_json(tmp_path: Path) -> None:
    saved = save(tmp_path, 1, {"model": {"x": torch.ones(1), "loss": float("nan")}})
    text = (saved / "manifest.json").read_text()
    content = json.loads(text, parse_constant=lambda word: pytest.fail(word))
    assert content["forms"]["model"]["loss"] == {"$float": "nan"}


def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, weights(step))
    damage(tmp_path / "step-3")
    (tmp_path / "step-2" / "manifest.json").unlink()
    told: list[str] = []
    found = Store(tmp_path).newest_intact(RUN_ID, told.append)
    assert found is not None
    assert found.manifest.step == 1
    assert told == [
        f"{tmp_path}/step-3: model.safetensors does not match its hash",
        f"{tmp_path}/step-2: manifest.json cannot be read: No such file or directory",
    ]
    with pytest.raises(CheckpointError, match="does not match its hash"):
        load_weights(tmp_path / "step-3")


def test_another_runs_checkpoint_is_not_ours(tmp_path: Path) -> None:
    save(tmp_path, 1, weights(1))
    save(tmp_path, 2, weights(2), run_id="f" * 16)
    told: list[str] = []
    found = Store(tmp_path).newest_intact(RUN_ID, told.append)
    assert found is not None
    assert found.manifest.step == 1
    assert "is of another run" in told[0]


def test_a_file_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    saved = save(tmp_path, 1, weights(1))
    with pytest.raises(CheckpointError, match=r"has no average\.safetensors, but model\.safetensors"):
        load_weights(saved, "average")


class TestPruning:
    def test_the_newest_stay_and_the_best_and_every_tenth(self, tmp_path: Path) -> None:
        for step in range(1, 26):
            save(tmp_path, step, weights(step), is_best=step in (3, 7), retention=Retention(2, keep_every=10))
        assert Store(tmp_path).steps() == [25, 24, 20, 10, 7]

    def test_what_was_just_saved_stays_beside_a_later_one_that_was_passed_over(self, tmp_path: Path) -> None:
        save(tmp_path, 2, weights(2))
        damage(save(tmp_path, 6, weights(6)))
        save(tmp_path, 4, weights(4), retention=Retention(1))
        assert Store(tmp_path).steps() == [6, 4]
        found = Store(tmp_path).newest_intact(RUN_ID, lambda _: None)
        assert found is not None
        assert found.manifest.step == 4

    def test_one_that_cannot_be_read_keeps_nothing_from_being_pruned(self, tmp_path: Path) -> None:
        for step in (1, 2, 3):
            save(tmp_path, step, weights(step), is_best=step == 1)
        damage(tmp_path / "step-2", "manifest.json")
        save(tmp_path, 4, weights(4), retention=Retention(1))
        assert Store(tmp_path).steps() == [4, 1]


class TestBest:
    def test_the_newest_that_says_so(self, tmp_path: Path) -> None:
        assert best_checkpoint(tmp_path) is None
        for step in (1, 2, 3):
            save(tmp_path, step, weights(step), is_best=step < 3)
        assert best_checkpoint(tmp_path) == tmp_path / "step-2"
        assert (tmp_path / "BEST").read_text() == f"step-2 {Store(tmp_path).manifest(2).commit}\n"

    def test_it_still_is_when_saved_again(self, tmp_path: Path) -> None:
        save(tmp_path, 1, weights(1), is_best=True)
        save(tmp_path, 1, weights(2))
        assert Store(tmp_path).best() == 1

    def test_a_pointer_that_a_kill_kept_from_moving_is_not_believed(self, tmp_path: Path) -> None:
        save(tmp_path, 1, weights(1), is_best=True)
        behind = (tmp_path / "BEST").read_bytes()
        save(tmp_path, 2, weights(2), is_best=True)
        (tmp_path / "BEST").write_bytes(behind)
        assert Store(tmp_path).best() == 2

    def test_the_pointer_helps_where_a_later_one_cannot_be_read(self, tmp_path: Path) -> None:
        for step in (1, 2):
            save(tmp_path, step, weights(step), is_best=step == 1)
        damage(tmp_path / "step-2", "manifest.json")
        assert Store(tmp_path).best() == 1
        (tmp_path / "BEST").unlink()
        with pytest.raises(CheckpointError, match="step-2"):
            Store(tmp_path).best()


class TestTidying:
    def test_what_kills_leave_is_cleared_away(self, tmp_path: Path) -> None:
        save(tmp_path, 1, weights(1))
        for name in (".draft-step-2-1-1", ".removed-step-0-7", ".replaced-step-1"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "model.safetensors").write_bytes(b"torn")
        (tmp_path / ".LATEST.draft").write_bytes(b"st")
        Store(tmp_path).tidy()
        assert names(tmp_path) == ["LATEST", "step-1"]

    def test_one_set_aside_for_a_successor_that_never_came_is_used_and_put_back(self, tmp_path: Path) -> None:
        saved = save(tmp_path, 1, weights(1))
        saved.rename(tmp_path / ".replaced-step-1")
        store = Store(tmp_path)
        assert store.load(1).values["model"]["x"].item() == 1
        store.tidy()
        assert names(tmp_path) == ["LATEST", "step-1"]

    def test_a_folder_that_is_not_there_is_tidy(self, tmp_path: Path) -> None:
        Store(tmp_path / "none").tidy()
        assert Store(tmp_path / "none").steps() == []
