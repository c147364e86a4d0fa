"""A checkpoint is there whole or not at all, and a damaged one is not loaded."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lockstep.checkpoint import store
from lockstep.checkpoint.store import CheckpointError, latest_checkpoint, load_weights, save_checkpoint


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    saved = save_checkpoint(tmp_path, 7, {"model": model.state_dict()}, {"metrics": {"loss": 1.0}})
    assert latest_checkpoint(tmp_path) == saved == tmp_path / "step-7"
    weights = load_weights(saved)
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def test_tied_and_strided_tensors(tmp_path: Path) -> None:
    tensor = torch.arange(6.0).view(2, 3)
    weights = load_weights(save_checkpoint(tmp_path, 1, {"model": {"a": tensor, "b": tensor, "t": tensor.t()}}, {}))
    assert torch.equal(weights["b"], tensor)
    assert torch.equal(weights["t"], tensor.t())


def test_the_newest_is_latest_and_a_step_can_be_saved_again(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    for step, value in ((1, 1.0), (2, 2.0), (2, 3.0)):
        save_checkpoint(tmp_path, step, {"model": {"x": torch.tensor(value)}}, {})
    latest = latest_checkpoint(tmp_path)
    assert latest is not None
    assert load_weights(latest)["x"].item() == 3.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-1", "step-2"]


def test_the_manifest_is_strict_json_and_facts_cannot_forge_it(tmp_path: Path) -> None:
    saved = save_checkpoint(
        tmp_path, 1, {"model": {"x": torch.ones(1)}}, {"metrics": {"loss": float("nan")}, "step": 9}
    )
    manifest = json.loads((saved / "manifest.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert manifest["metrics"] == {"loss": "nan"}
    assert manifest["step"] == 1


def test_a_failed_save_leaves_the_last_good_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 1, {"model": {"x": torch.ones(1)}}, {})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_flush", full)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(tmp_path, 2, {"model": {"x": torch.ones(1)}}, {})
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["LATEST", "step-1"]


def test_a_flipped_bit_is_detected(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, 1, {"model": {"x": torch.ones(4)}}, {})
    data = bytearray((saved / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (saved / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="does not match its hash"):
        load_weights(saved)


@pytest.mark.parametrize("name", ["../../etc", "step-", "step-1/../..", ""])
def test_latest_is_not_trusted(tmp_path: Path, name: str) -> None:
    (tmp_path / "LATEST").write_text(name)
    with pytest.raises(CheckpointError, match="LATEST"):
        latest_checkpoint(tmp_path)
