"""A run goes on compiled or not: no saved name shows which, and checkpoints with the wrappers' names still load."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint.checkpoint_contents import checkpoint_digest, renamed
from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.weights_io import export_weights
from lockstep.train.optim.lr_schedule import Schedule
from lockstep.train.run import Run
from lockstep.train.train_state import TrainState
from lockstep.world.world import World
from tests.classification import loss


def bare(model: nn.Sequential) -> nn.Module:
    return model


def compiled(model: nn.Sequential) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def partly_compiled(model: nn.Sequential) -> nn.Module:
    model[2] = torch.compile(model[2], backend="eager")  # type: ignore[assignment]
    return model


def compiled_in_place(model: nn.Sequential) -> nn.Module:
    model.compile(backend="eager")
    return model


# The compiler reads `.grad` of its own stand-ins for parameters.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

WAYS = [bare, compiled, partly_compiled, compiled_in_place]

Way = Callable[[nn.Sequential], nn.Module]


def train(folder: Path | None, way: Way, steps: int, *, compile_after: bool = False) -> str:
    run = Run(folder, World(), seed=7, sinks=[])
    inner = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Sequential(nn.Linear(16, 16), nn.GELU()))
    inner.append(nn.Linear(16, 3))
    model = way(run.prepare(inner)) if compile_after else run.prepare(way(inner))
    optimizer = run.optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1), Schedule.constant())
    run.ema(model, 0.9)
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 6, generator=generator), torch.randint(0, 3, (64,), generator=generator))
    for step in run.steps(run.loader(data, 32, lanes=2), steps=steps, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
    return run.finish()


def saved_names(folder: Path) -> set[str]:
    names: set[str] = set()
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


@pytest.fixture(scope="module")
def whole() -> str:
    return train(None, bare, 4)


@pytest.mark.parametrize("first", WAYS)
def test_a_run_goes_on_in_any_way(first: Way, whole: str, tmp_path: Path) -> None:
    train(tmp_path / "run", first, 2)
    names = saved_names(tmp_path / "run")
    assert "0.weight" in names
    assert not [name for name in names if "_orig_mod" in name]
    manifest = next((tmp_path / "run").rglob("manifest.json")).read_text()
    assert "_orig_mod" not in manifest
    then = WAYS[(WAYS.index(first) + 1) % len(WAYS)]
    assert train(tmp_path / "run", then, 4) == whole


@pytest.mark.parametrize("way", [compiled, partly_compiled])
def test_the_model_may_be_compiled_after_it_was_prepared(way: Way, whole: str, tmp_path: Path) -> None:
    assert train(tmp_path / "run", way, 4, compile_after=True) == whole
    assert not [name for name in saved_names(tmp_path / "run") if "_orig_mod" in name]


def test_compiling_is_noticed_on_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tmp_path / "run", bare, 2)
    train(tmp_path / "run", bare, 3)
    assert "torch.compile" not in caplog.text
    train(tmp_path / "run", compiled, 4)
    assert "step-3 was saved without torch.compile, and the run continues with it" in caplog.text
    train(tmp_path / "run", bare, 5)
    assert "step-4 was saved with torch.compile, and the run continues without" in caplog.text


def save_with_wrapper_names(way: Way, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Train and save as a version that kept the wrappers' names would."""
    prefix = {compiled: "_orig_mod.", partly_compiled: "2._orig_mod."}[way]
    plain_prefix = prefix.removesuffix("_orig_mod.")
    values = TrainState.values

    def wrapped(name: str) -> str:
        return prefix + name.removeprefix(plain_prefix) if name.startswith(plain_prefix) else name

    def old_values(state: TrainState) -> Mapping[str, Any]:
        return renamed(values(state), lambda name: name if name == "num_updates" else wrapped(name))

    with monkeypatch.context() as patch:
        patch.setattr(TrainState, "values", old_values)
        train(folder, way, 2)
    assert {f"{prefix}0.weight"} & saved_names(folder)


@pytest.mark.parametrize("way", [compiled, partly_compiled])
def test_checkpoints_with_the_wrappers_names_load(
    way: Way, whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for then in (bare, compiled, partly_compiled):
        folder = tmp_path / then.__name__
        save_with_wrapper_names(way, monkeypatch, folder)
        assert train(folder, then, 4) == whole


def test_an_export_has_the_bare_models_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_with_wrapper_names(partly_compiled, monkeypatch, tmp_path / "run")
    for weights in ("model", "average"):
        export_weights(tmp_path / "run", tmp_path / "exported.safetensors", weights=weights, overwrite=True)
        with safe_open(tmp_path / "exported.safetensors", "pt") as file:
            names = set(file.keys())
        assert "2.0.weight" in names
        assert not [name for name in names if "_orig_mod" in name]


def test_two_tensors_never_share_a_name_in_an_export(tmp_path: Path) -> None:
    torch.save({"x": torch.zeros(1), "_orig_mod.x": torch.ones(1)}, tmp_path / "theirs.pt")
    export_weights(tmp_path / "theirs.pt", tmp_path / "ours.safetensors", pickled=True)
    with safe_open(tmp_path / "ours.safetensors", "pt") as file:
        assert set(file.keys()) == {"x", "_orig_mod.x"}


def test_the_digest_of_a_checkpoint_is_that_of_the_run(tmp_path: Path) -> None:
    digest = train(tmp_path / "run", compiled, 2)
    assert checkpoint_digest(CheckpointStore(tmp_path / "run" / "checkpoints").load(2).values) == digest
