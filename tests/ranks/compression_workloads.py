"""A small model trained with compressed gradients."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine.state_digest import tensor_digests
from lockstep.errors import Stopped
from lockstep.train.run import Run
from lockstep.world.world import World

POWERSGD = {"kind": "powersgd", "rank": 2, "start_after": 2}


KINDS: dict[str, Any] = {"none": "none", "fp16": "fp16", "bf16": "bf16", "powersgd": POWERSGD}


STEPS = 6


class Result(NamedTuple):
    losses: list[float]
    weights: Tensor
    digests: dict[str, str]
    traffic: dict[str, int]
    sent: int  # bytes handed over to gloo


def make_model() -> nn.Module:
    """Large enough for several buckets: more than a megabyte."""
    return nn.Sequential(nn.Linear(64, 3000), nn.Tanh(), nn.Linear(3000, 64), nn.Tanh(), nn.Linear(64, 5))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(92, 64, generator=generator), torch.arange(92) % 5)


def loss(scale: float, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    return scale * F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def train(
    world: World, folder: Path | None = None, stop: int | None = None, scale: float = 1.0, **options: Any
) -> Result:
    torch.set_num_threads(1)
    job = Run(folder, world, seed=5, sinks=[], determinism="fast", **options)
    job.stop_after = stop
    model = job.prepare(make_model())
    optimizer = job.optimizer(model, lambda p: torch.optim.SGD(p, lr=0.1 / scale, momentum=0.9))
    losses = []
    sent = _count_sent_bytes(world)
    try:
        # The last batch of an epoch is smaller: losses are then divided by another count than the one before.
        for step in job.steps(job.loader(data(), 24, lanes=4, tail="short"), steps=STEPS, finish=False):
            step.accumulate(partial(loss, scale), model)
            step.update(optimizer)
            losses.append(step.loss)
    except Stopped:
        job.close()
    digests = tensor_digests(job.state())
    if stop is None:
        job.finish()
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    return Result(losses, weights, digests, job.traffic, sent())


def _count_sent_bytes(world: World) -> Callable[[], int]:
    """Count the bytes that this rank sends over gloo from now on; return a function that returns the count."""
    if world.backend == "nccl":
        return lambda: 0
    sizes: list[int] = []
    isend = dist.isend

    def counted(tensor: Tensor, *args: Any) -> Any:
        sizes.append(tensor.nbytes)
        return isend(tensor, *args)

    dist.isend = counted

    def total() -> int:
        dist.isend = isend
        return sum(sizes)

    return total
