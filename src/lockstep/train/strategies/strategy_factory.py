"""Chooses the parallel strategy of a run: by name, or for `parallel: auto` by what fits into memory."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.checkpoint.available_memory import available_memory_bytes, format_megabytes
from lockstep.data.loader_factory import Loader
from lockstep.errors import UserError
from lockstep.train.step_options import StepOptions
from lockstep.train.strategies.mesh import Mesh
from lockstep.train.strategies.parallel_strategy import DataParallel, Ddp, ParallelStrategy, Single
from lockstep.train.strategies.zero import Zero
from lockstep.world.collectives import all_reduce
from lockstep.world.world import World

_STRATEGIES: dict[str, type[ParallelStrategy]] = {each.name: each for each in (Single, DataParallel, Ddp, Zero, Mesh)}
_USABLE = 0.5  # of a device's memory; the rest is for activations, and for other processes


class StrategyChoice(NamedTuple):
    """A strategy, and why it was chosen."""

    strategy: ParallelStrategy
    reason: str


def choose_strategy(
    world: World, options: StepOptions, models: Sequence[nn.Module] = (), *, keep_gradients: bool = False
) -> StrategyChoice:
    """Return the strategy that `parallel` names; for `auto`, by the number of processes and the size of the models.

    Args:
        world: this rank, and how many there are.
        options: the run's options.
        models: the models, if they are known yet.
        keep_gradients: gradients must stay valid after the update, too.
    """
    name, reason = options.parallel, "as configured"
    if name == "auto":
        name, reason = _choose_by_size(world, options, models)
    elif not isinstance(name, str):
        name = Mesh.name
    if name not in _STRATEGIES:
        raise UserError(f"parallel={name!r}: expected one of {', '.join(['auto', *_STRATEGIES])}")
    kind = _STRATEGIES[name]
    if not kind.is_exact and options.determinism == "lockstep":
        raise UserError(
            f"parallel={options.parallel} sums gradients in an order that depends on the number of processes: set "
            f"determinism=fast, or use one of {', '.join(n for n, k in _STRATEGIES.items() if k.is_exact)}"
        )
    _check_compression(options, kind)
    return StrategyChoice(kind(world, options, keep_gradients=keep_gradients), reason)


def recheck_choice(choice: StrategyChoice, optimizers: Collection[Optimizer], loader: Loader) -> StrategyChoice:
    """Check that the chosen strategy fits the optimizers and the loader. Called when training begins.

    If `auto` has chosen `zero` by size and it does not fit, fall back to `ddp`, which places models the same way.
    """
    strategy, reason = choice
    try:
        strategy.check_fit(optimizers, loader)
    except UserError as problem:
        if strategy.options.parallel != "auto" or not isinstance(strategy, Zero) or strategy.has_begun:
            raise
        return StrategyChoice(Ddp(strategy.world, strategy.options), f"{reason}; but {problem}")
    return choice


def _choose_by_size(world: World, options: StepOptions, models: Sequence[nn.Module]) -> tuple[str, str]:
    if world.size == 1:
        return "single", "one process"
    if not models:
        return "ddp", f"{world.size} processes"
    if options.compression.kind != "none":
        return "ddp", f"compression={options.compression.kind}"
    weights = sum(p.nbytes for p in {p for model in models for p in model.parameters()})
    # Weights, gradients, and an optimizer like AdamW, with two numbers for each weight.
    whole, sharded = 4 * weights, 2 * weights + 2 * weights // world.size
    room = int(_USABLE * _smallest_memory(world))
    within = f"and there is room for {format_megabytes(room)}"
    if whole <= room:
        return "ddp", f"weights, gradients and optimizer make {format_megabytes(whole)} on each device, {within}"
    if sharded > room and options.determinism == "fast" and len(models) == 1:  # earlier models are already placed whole
        return "fsdp", f"weights and gradients alone make {format_megabytes(2 * weights)}, {within}"
    hint = "" if sharded <= room else "; parallel=fsdp needs less, with determinism=fast"
    shared = f"{format_megabytes(whole)} on each device, {format_megabytes(sharded)} with the optimizer shared out"
    return "zero", f"weights, gradients and optimizer make {shared}, {within}{hint}"


def _smallest_memory(world: World) -> int:
    """Return the least memory that any rank may use of its device: the same on all ranks."""
    if world.device.type == "cuda":
        total = torch.cuda.mem_get_info(world.device)[1]
        sharing = -(-world.local_size // torch.cuda.device_count())
    else:
        total, sharing = available_memory_bytes() or 2**62, world.local_size
    return int(all_reduce(torch.tensor(total // sharing, device=world.device), "min").item())


def _check_compression(options: StepOptions, kind: type[ParallelStrategy]) -> None:
    compression = options.compression
    if compression.kind == "none":
        return
    if options.determinism == "lockstep":
        raise UserError(
            f"compression={compression.kind} rounds what every process sends, so the bits depend on their number: "
            "set determinism=fast, or omit compression"
        )
    if not kind.compresses:
        raise UserError(
            f"compression={compression.kind} is for gradients that every process gets whole, and parallel={kind.name} "
            "shards them: use parallel=ddp, or omit compression"
        )
    if compression.kind == "powersgd" and compression.error_feedback and options.precision == "fp16":
        raise UserError(
            "compression=powersgd adds the error of one gradient to the next, which precision=fp16 may scale "
            "differently: use precision=bf16, or compression={kind: powersgd, error_feedback: false}"
        )
