"""Weights of a model under DistributedDataParallel load into a bare model, and the other way round."""

from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lockstep
from lockstep.engine.state_digest import digest, state_of
from lockstep.testing import ranks
from lockstep.world.world import World
from tests import checkpoints


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def digest_of(model: nn.Module) -> str:
    return digest(state_of({"model": model}, {}))


def train_wrapped(world: World, folder: str) -> tuple[str, list[str]]:
    """One step of plain DDP, saved by rank 0 as it is: with the wrapper's prefix."""
    wrapped = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    wrapped(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    lockstep.barrier()
    checkpoints.save(Path(folder) / "checkpoints", 1, {"model": wrapped.state_dict()}, world=world)
    if world.is_main:
        torch.save({"model_state_dict": wrapped.state_dict()}, Path(folder) / "wrapped.pt")
    return digest_of(wrapped.module), list(wrapped.state_dict())


def load_wrapped(world: World, source: str, is_compiled: bool) -> str:
    model = make_model()
    inner = torch.compile(model, backend="eager") if is_compiled else model
    lockstep.load_checkpoint(DistributedDataParallel(inner), source, pickled=True)  # type: ignore[arg-type]
    return digest_of(model)


def test_wrapped_weights_go_into_a_bare_model_and_back_on_every_rank(tmp_path: Path) -> None:
    (saved, names), _ = ranks(2).run(train_wrapped, str(tmp_path))
    assert all(name.startswith("module.") for name in names)
    for source in (tmp_path, tmp_path / "wrapped.pt"):
        bare = make_model()
        assert digest_of(bare) != saved
        lockstep.load_checkpoint(bare, source, pickled=True)
        assert digest_of(bare) == saved
    checkpoints.save(tmp_path / "checkpoints", 2, {"model": bare.state_dict()})
    for is_compiled in (False, True):
        assert ranks(2).run(load_wrapped, str(tmp_path), is_compiled) == [saved, saved]
