"""Lockstep and fast mode against hand-written DDP with the same micro-steps, over gloo.

    .venv/bin/python bench/two_processes.py [--processes 2] [--lanes 4] [--rounds 12] [--steps 8] [--bucket-mb 4]

One thread per process. DDP is set up to be fast: `gradient_as_bucket_view`, and `no_sync` in all but the last
micro-step. Bytes are what rank 0's engine sent in one step; a ring sends 2 (W - 1) / W times the gradients. Peak memory
is measured in a process that does nothing else, above what it needed before the first step.
"""

import argparse
import contextlib
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch.nn.parallel import DistributedDataParallel

from lockstep.bench.bench_models import Workload, build_workload
from lockstep.bench.contender_loops import LockstepLoop
from lockstep.bench.interleaved_timing import VariantTiming, interleave, timing_table
from lockstep.engine.tree_engine import TreeEngine
from lockstep.testing import ranks
from lockstep.world.world import World

SGD = partial(torch.optim.SGD, lr=1e-3)
WORKLOADS = {"mlp-9M": 64, "gpt-9M": 16}


def hand_written(work: Workload, world: World, batch: int, lanes: int, steps: int) -> Callable[[], None]:
    model = work.make_model()
    replicas = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = SGD(model.parameters())
    per_rank, lane_batch = lanes // world.size, batch // lanes

    def run() -> None:
        for step in range(steps):
            optimizer.zero_grad(set_to_none=True)
            for lane in range(per_rank):
                start = step * batch + (world.rank * per_rank + lane) * lane_batch
                part = [tensor[start : start + lane_batch] for tensor in work.data.tensors]
                with replicas.no_sync() if lane < per_rank - 1 else contextlib.nullcontext():
                    loss_sum, count = work.loss_sum(replicas, part)
                    (loss_sum / (count * per_rank)).backward()
            optimizer.step()

    return run


def compare(
    world: World, name: str, batch: int, lanes: int, steps: int, rounds: int, bucket_mb: float
) -> tuple[list[VariantTiming], int, int]:
    torch.set_num_threads(1)
    work = build_workload(name, batch * steps)
    tree, fast = (
        LockstepLoop(work, world, batch, lanes, SGD, determinism=determinism, bucket_mb=bucket_mb)
        for determinism in ("lockstep", "fast")
    )
    timings = interleave(
        {
            "hand-written DDP": hand_written(work, world, batch, lanes, steps),
            "the same again": hand_written(work, world, batch, lanes, steps),
            "lockstep": partial(tree.advance, steps),
            "fast": partial(fast.advance, steps),
        },
        rounds,
        steps,
    )
    engine = tree.run._loop.engine
    assert isinstance(engine, TreeEngine) and engine.comm is not None
    before = engine.comm.bytes_sent
    tree.advance(steps)
    sent = (engine.comm.bytes_sent - before) // steps
    tree.run.close()
    fast.run.close()
    return timings, sent, 4 * sum(parameter.numel() for parameter in work.make_model().parameters())


def peak_memory(world: World, name: str, batch: int, lanes: int, kind: str) -> int:
    """The peak memory of training in bytes, above what the process needed before."""
    torch.set_num_threads(1)
    work = build_workload(name, batch * 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if kind == "ddp":
        hand_written(work, world, batch, lanes, 4)()
    else:
        loop = LockstepLoop(work, world, batch, lanes, SGD, determinism=kind)
        loop.advance(4)
        loop.run.close()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--lanes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--bucket-mb", type=float, default=4.0)
    parser.add_argument("--memory", nargs=2, metavar=("KIND", "MODEL"), help="print only this peak memory")
    options = parser.parse_args()
    if options.memory:
        kind, name = options.memory
        group = ranks(options.processes, timeout_s=300)
        peaks = group.run(peak_memory, name, WORKLOADS[name], options.lanes, kind)
        print(f"peak memory of {name}, {kind}: {max(peaks) / 2**20:.0f} MiB", flush=True)
        return
    for name, batch in WORKLOADS.items():
        group = ranks(options.processes, timeout_s=1500)
        timings, sent, size = group.run(
            compare, name, batch, options.lanes, options.steps, options.rounds, options.bucket_mb
        )[0]
        ring = 2 * size * (options.processes - 1) // options.processes
        print(timing_table(f"{name}: {options.processes} processes, {options.lanes} lanes, batch {batch}", timings))
        print(f"bytes that a rank sends per step: {sent:,}; a ring's: {ring:,}; ratio {sent / ring:.4f}\n", flush=True)
    for name in WORKLOADS:
        for kind in ("ddp", "lockstep", "fast"):  # each in new processes: a peak never falls
            command = [sys.executable, __file__, "--memory", kind, name, "--processes", str(options.processes)]
            subprocess.run([*command, "--lanes", str(options.lanes)], check=True)


if __name__ == "__main__":
    main()
