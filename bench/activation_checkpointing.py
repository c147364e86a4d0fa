"""Activation checkpointing: peak memory and time of a step of a GPT, with and without.

    .venv/bin/python bench/activation_checkpointing.py [--depth 12] [--width 256] [--length 256] [--batch 16]
        [--rounds 8] [--steps 2] [--device auto]

One process, one thread, a single lane. Times are interleaved in one process. Peaks are measured in a new process for
each round and kind: on a CPU the peak resident memory above that before the model was made, on a GPU the peak of
torch's allocator. Both include weights, gradients and the optimizer's state. On a CPU, resident memory depends on how
much freed memory the C library keeps: for "needed", it returns all of it at once.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from typing import Any

import torch
from torch.utils.data import TensorDataset

from lockstep.bench.bench_models import BenchGpt, Workload, next_token_loss
from lockstep.bench.contender_loops import LockstepLoop
from lockstep.bench.interleaved_timing import interleave, timing_table
from lockstep.world.process_group import setup_distributed
from lockstep.world.process_memory import peak_memory_bytes

KINDS: dict[str, dict[str, Any]] = {
    "kept": {},
    "kept again": {},
    "recomputed": {"activation_checkpointing": {}},
    "every other block recomputed": {"activation_checkpointing": {"every": 2}},
}
VOCABULARY = 2000


def make_loop(sizes: argparse.Namespace, kind: str) -> LockstepLoop:
    torch.set_num_threads(1)
    world = setup_distributed(device=None if sizes.device == "auto" else sizes.device)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, VOCABULARY, (sizes.batch * 4, sizes.length + 1), generator=generator)
    data = TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    heads = 8
    work = Workload(lambda: BenchGpt(VOCABULARY, sizes.width, sizes.depth, sizes.length, heads), data, next_token_loss)
    make = partial(torch.optim.AdamW, lr=1e-4)
    return LockstepLoop(work, world, sizes.batch, 1, make, **KINDS[kind])


def advance(loop: LockstepLoop, steps: int) -> None:
    loop.advance(steps)
    if loop.run.world.device.type == "cuda":
        torch.cuda.synchronize()


def peak_of(sizes: argparse.Namespace, kind: str) -> None:
    """Print the peak memory of this process."""
    device = setup_distributed(device=None if sizes.device == "auto" else sizes.device).device
    name = "peak_device_bytes" if device.type == "cuda" else "peak_host_bytes"
    before = peak_memory_bytes(device)[name]
    loop = make_loop(sizes, kind)
    loop.advance(2)
    print(json.dumps(peak_memory_bytes(device)[name] - before))


def peaks(sizes: argparse.Namespace, variables: dict[str, str]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for _ in range(sizes.memory_rounds):
        for kind in KINDS:
            command = [sys.executable, *sys.argv, "--peak-of", kind]
            out = subprocess.run(
                command, env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True
            ).stdout
            found[kind].append(json.loads(out.splitlines()[-1]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--memory-rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--peak-of", choices=KINDS)
    options = parser.parse_args()
    if options.peak_of is not None:
        peak_of(options, options.peak_of)
        return
    shape = f"GPT of {options.depth} blocks, width {options.width}, {options.batch} × {options.length} tokens"
    for title, variables in {"needed": {"MALLOC_MMAP_THRESHOLD_": "262144"}, "resident": {}}.items():
        found = peaks(options, variables)
        base = statistics.median(found["kept"])
        print(f"{shape}\n| {title} | peak MB | ratio | range |\n|---|---|---|---|")
        for kind, values in found.items():
            low, high = min(values) / base, max(values) / base
            middle = statistics.median(values)
            print(f"| {kind} | {middle / 1e6:,.1f} | {middle / base:.3f} | {low:.2f}–{high:.2f} |")
        print(flush=True)
    loops = {kind: make_loop(options, kind) for kind in KINDS}
    timings = interleave(
        {kind: partial(advance, loop, options.steps) for kind, loop in loops.items()}, options.rounds, options.steps
    )
    print(timing_table(shape, timings), flush=True)
    for loop in loops.values():
        loop.run.close()


if __name__ == "__main__":
    main()
