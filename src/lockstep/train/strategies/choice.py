"""Which strategy a run has: the one place that knows them by name."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint.memory_room import available_bytes, megabytes
from lockstep.data.foreign import Loader
from lockstep.errors import UserError
from lockstep.train.options import StepOptions
from lockstep.train.strategies.data_parallel import DataParallel
from lockstep.train.strategies.mesh import Mesh
from lockstep.train.strategies.strategy import Ddp, Single, Strategy
from lockstep.train.strategies.zero import Zero
from lockstep.world.collectives import all_reduce
from lockstep.world.world import World

_STRATEGIES: dict[str, type[Strategy]] = {each.name: each for each in (Single, DataParallel, Ddp, Zero, Mesh)}
_FIT = 0.5  # of a device's memory; the rest is for what the forward pass keeps, and for whoever else is there


class Choice(NamedTuple):
    strategy: Strategy
    reason: str


def choose_strategy(
    world: World, options: StepOptions, models: Sequence[nn.Module] = (), *, keep_gradients: bool = False
) -> Choice:
    """As `parallel` says; `auto` by the number of processes and, as soon as those are known, the models' sizes."""
    name, reason = options.parallel, "as configured"
    if name == "auto":
        name, reason = _by_size(world, options, models)
    elif not isinstance(name, str):
        name = Mesh.name
    if name not in _STRATEGIES:
        raise UserError(f"parallel={name!r}: expected one of {', '.join(['auto', *_STRATEGIES])}")
    kind = _STRATEGIES[name]
    if not kind.is_exact and options.determinism == "lockstep":
        raise UserError(
            f"parallel={options.parallel} adds up in an order of its own, so the bits follow the number of processes: "
            f"set determinism=fast, or take one of {', '.join(n for n, k in _STRATEGIES.items() if k.is_exact)}"
        )
    _check_compression(options, kind)
    return Choice(kind(world, options, keep_gradients=keep_gradients), reason)


def settled(choice: Choice, optimizers: Collection[Optimizer], loader: Loader) -> Choice:
    """When training begins. `auto` has chosen by size alone, and may have to choose again by what is trained, and how.

    Models lie under `ddp` as they do under `zero`.
    """
    strategy, reason = choice
    try:
        strategy.check_fit(optimizers, loader)
    except UserError as problem:
        if strategy.options.parallel != "auto" or not isinstance(strategy, Zero) or strategy.has_begun:
            raise
        return Choice(Ddp(strategy.world, strategy.options), f"{reason}; but {problem}")
    return choice


def _by_size(world: World, options: StepOptions, models: Sequence[nn.Module]) -> tuple[str, str]:
    if world.size == 1:
        return "single", "one process"
    if not models:
        return "ddp", f"{world.size} processes"
    if options.compression.kind != "none":
        return "ddp", f"compression={options.compression.kind}"
    weights = sum(p.nbytes for p in {p for model in models for p in model.parameters()})
    # Weights, gradients, and an optimizer like AdamW, which keeps two numbers for each weight.
    whole, sharded = 4 * weights, 2 * weights + 2 * weights // world.size
    room = int(_FIT * _smallest_memory(world))
    within = f"and there is room for {megabytes(room)}"
    if whole <= room:
        return "ddp", f"weights, gradients and optimizer make {megabytes(whole)} on each device, {within}"
    if sharded > room and options.determinism == "fast" and len(models) == 1:  # before others lie whole
        return "fsdp", f"weights and gradients alone make {megabytes(2 * weights)}, {within}"
    hint = "" if sharded <= room else "; parallel=fsdp needs less, with determinism=fast"
    shared = f"{megabytes(whole)} on each device, {megabytes(sharded)} with the optimizer shared out"
    return "zero", f"weights, gradients and optimizer make {shared}, {within}{hint}"


def _smallest_memory(world: World) -> int:
    """Of all ranks' devices, what a rank may have: the same answer on all of them."""
    if world.device.type == "cuda":
        total = torch.cuda.mem_get_info(world.device)[1]
        sharing = -(-world.local_size // torch.cuda.device_count())
    else:
        total, sharing = available_bytes() or 2**62, world.local_size
    return int(all_reduce(torch.tensor(total // sharing, device=world.device), "min").item())


def _check_compression(options: StepOptions, kind: type[Strategy]) -> None:
    compression = options.compression
    if compression.kind == "none":
        return
    if options.determinism == "lockstep":
        raise UserError(
            f"compression={compression.kind} rounds what every process sends, so the bits follow their number: "
            "set determinism=fast, or leave compression away"
        )
    if not kind.compresses:
        raise UserError(
            f"compression={compression.kind} is for gradients that every process gets whole, and parallel={kind.name} "
            "shares them in another way: use parallel=ddp, or leave compression away"
        )
    if compression.kind == "powersgd" and compression.error_feedback and options.precision == "fp16":
        raise UserError(
            "compression=powersgd adds what it left out of one gradient to the next, and precision=fp16 may scale that "
            "one differently: use precision=bf16, or compression={kind: powersgd, error_feedback: false}"
        )
