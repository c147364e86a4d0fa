"""The cost of snapshots in memory: training with them against training without; the target ratio is 1.02.

    .venv/bin/python bench/snapshots.py [--processes 1 2] [--model conv] [--batch 64] [--rounds 20] [--seconds 4]

Each variant trains for about `--seconds` per round, in turn; one thread per process, AdamW, nothing is written to disk.
Not every round has a snapshot, so sums over all rounds are compared, not medians. The clock of the snapshots is paused
while the other variants train. Processor time is rank 0's; it is meaningful on a busy machine too.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from lockstep.bench.bench_models import build_workload
from lockstep.events.jsonl import read_jsonl
from lockstep.testing import ranks
from lockstep.train.run import Run
from lockstep.world.collectives import barrier
from lockstep.world.object_collectives import broadcast_object
from lockstep.world.world import World

VARIANTS = ("without", "without again", "with")


class Figures(NamedTuple):
    steps: int  # per round
    seconds: dict[str, list[float]]  # by variant and round
    processor_s: dict[str, float]  # by variant
    costs_s: list[float]  # of each snapshot, as reported by the run
    num_bytes: int


class Variant:
    def __init__(self, world: World, folder: Path, model: str, batch: int, *, snapshots: bool) -> None:
        work = build_workload(model, batch * 64)
        os.environ["TORCHELASTIC_MAX_RESTARTS"] = str(int(snapshots))
        self.run = Run(folder, world, sinks=[])
        self.folder = folder
        module = self.run.prepare(work.make_model())
        optimizer = self.run.optimizer(module, lambda params: torch.optim.AdamW(params, lr=1e-4))
        training = iter(self.run.steps(self.run.loader(work.data, batch, lanes=4), steps=10**9, finish=False))

        def step() -> None:
            current = next(training)
            current.accumulate(work.loss_sum, module)
            current.update(optimizer)

        self.step: Callable[[], None] = step
        for _ in range(3):
            step()
        self._stopped_at = time.perf_counter()
        self.processor_s = 0.0

    def train(self, steps: int) -> float:
        storage = self.run._checkpointer._storage
        assert storage is not None
        barrier()
        began, began_cpu = time.perf_counter(), time.process_time()
        storage.snapshots._cadence._began_at += began - self._stopped_at
        for _ in range(steps):
            self.step()
        barrier()
        self._stopped_at = time.perf_counter()
        self.processor_s += time.process_time() - began_cpu
        return self._stopped_at - began


def compare(world: World, place: str, model: str, batch: int, rounds: int, seconds: float) -> Figures:
    torch.set_num_threads(1)
    variants = {name: Variant(world, Path(place) / name, model, batch, snapshots=name == "with") for name in VARIANTS}
    pilot = variants["without"].train(10) / 10
    steps = broadcast_object(max(1, round(seconds / pilot)))
    variants["without"].processor_s = 0.0
    durations: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for number in range(rounds):
        for name in VARIANTS[number % 3 :] + VARIANTS[: number % 3]:
            durations[name].append(variants[name].train(steps))
    processor_s = {name: variant.processor_s for name, variant in variants.items()}
    for variant in variants.values():
        variant.run.finish()
    events = [each for each in read_jsonl(variants["with"].folder / "ranks" / "0.jsonl") if each.get("in_memory")]
    costs = [event["stall_s"] + event["write_s"] for event in events]
    return Figures(steps, durations, processor_s, costs, events[-1]["num_bytes"] if events else 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--model", default="conv", help="tiny, mlp, mlp-9M, conv, gpt or gpt-9M")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0, help="how long each variant trains per round")
    options = parser.parse_args()
    for processes in options.processes:
        with tempfile.TemporaryDirectory(dir=".") as place:
            chosen = (options.model, options.batch, options.rounds, options.seconds)
            figures = ranks(processes, timeout_s=3600).run(compare, str(Path(place).resolve()), *chosen)[0]
        base = sum(figures.seconds["without"])
        per_step = 1e3 * base / options.rounds / figures.steps
        rounds = f"{options.rounds} rounds of {figures.steps} steps of {per_step:.1f} ms"
        print(f"\n{options.model} on {processes} processes: {rounds}")
        for name in VARIANTS[1:]:
            ratios = sorted(own / of for own, of in zip(figures.seconds[name], figures.seconds["without"], strict=True))
            total = sum(figures.seconds[name]) / base
            processor = figures.processor_s[name] / figures.processor_s["without"]
            span = f"rounds {ratios[0]:.3f}–{ratios[-1]:.3f}"
            print(f"  {name:<14} / without: {total:.4f} in all, {span}; processor time {processor:.4f}")
        cost = sum(figures.costs_s) / sum(figures.seconds["with"])
        snapshots = f"{len(figures.costs_s)} snapshots of {figures.num_bytes / 1e6:.1f} MB"
        print(f"  {snapshots}, taking {100 * cost:.2f} % of the time")


if __name__ == "__main__":
    main()
