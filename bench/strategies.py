"""Parallel strategies: time of a step, and bytes of weights and optimizer state on each rank.

    .venv/bin/python bench/strategies.py [--processes 2] [--lanes 4] [--rounds 12] [--steps 8]

One thread per process, AdamW, every variant through `lockstep.Run`.
"""

import argparse
from functools import partial
from typing import Any, NamedTuple

import torch

from lockstep.bench.bench_models import build_workload
from lockstep.bench.contender_loops import LockstepLoop
from lockstep.bench.interleaved_timing import VariantTiming, interleave, timing_table
from lockstep.testing import ranks
from lockstep.world.world import World

WORKLOADS = {"mlp-9M": 64, "gpt-9M": 16}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"parallel": "ddp"},
    "ddp again": {"parallel": "ddp"},
    "zero": {"parallel": "zero"},
    "ddp, fast": {"parallel": "ddp", "determinism": "fast"},
    "fsdp": {"parallel": "fsdp", "determinism": "fast", "fsdp": {"min_parameters": 1e5}},
}


class Sizes(NamedTuple):
    weights: int
    optimizer: int


def sizes_on_this_rank(loop: LockstepLoop) -> Sizes:
    here = loop.run._state.strategy.optimizer_here(loop.optimizer)
    state = [value for each in here.state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return Sizes(sum(map(_bytes_here, loop.model.parameters())), sum(map(_bytes_here, state)))


def compare(
    world: World, name: str, batch: int, lanes: int, steps: int, rounds: int
) -> tuple[list[VariantTiming], dict[str, Sizes]]:
    torch.set_num_threads(1)
    work = build_workload(name, batch * steps)
    make = partial(torch.optim.AdamW, lr=1e-4)
    loops = {kind: LockstepLoop(work, world, batch, lanes, make, **options) for kind, options in STRATEGIES.items()}
    timings = interleave({kind: partial(loop.advance, steps) for kind, loop in loops.items()}, rounds, steps)
    found = {kind: sizes_on_this_rank(loop) for kind, loop in loops.items()}
    for loop in loops.values():
        loop.run.close()
    return timings, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    for name, batch in WORKLOADS.items():
        group = ranks(options.processes, timeout_s=1500)
        answers = group.run(compare, name, batch, options.lanes, options.steps, options.rounds)
        title = f"{name}: {options.processes} processes, {options.lanes} lanes, batch {batch}"
        print(timing_table(title, answers[0][0]))
        print("| | weights, bytes by rank | optimizer, bytes by rank |\n|---|---|---|")
        for kind in STRATEGIES:
            weights = ", ".join(f"{found[kind].weights:,}" for _, found in answers)
            optimizer = ", ".join(f"{found[kind].optimizer:,}" for _, found in answers)
            print(f"| {kind} | {weights} | {optimizer} |")
        print(flush=True)


def _bytes_here(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "to_local", lambda: tensor)()
    return int(local.nbytes)


if __name__ == "__main__":
    main()
