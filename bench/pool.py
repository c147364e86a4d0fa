"""How well the evaluation pool balances designs of very different costs, on 2, 4 and 8 processes.

    python bench/pool.py

The fitness sleeps for a lognormal time (so that any machine has enough cores), the same for every number of processes;
then again with the last rank at a third of the others' speed. The ideal divides all work in proportion to speed, unless
the longest single design takes longer. The pool is compared with a split into equal blocks, as in a hand-written loop.
Times are of whole generations, including the exchange of results.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import lockstep
from lockstep.search.design_archive import DesignArchive
from lockstep.search.evaluation_pool import EvaluationPool
from lockstep.search.evaluation_records import EvaluationRecords
from lockstep.search.evaluators import ScalarEvaluator
from lockstep.search.genome import FloatGene, Genome
from lockstep.search.problem import Objective, Problem
from lockstep.world.object_collectives import all_gather_object
from lockstep.world.world import World

MEAN_S = 0.02
SPREAD = 1.5  # standard deviation of the time's logarithm: one in a hundred takes thirty times the median
SLOWNESS = 3.0  # of the slow rank
GENERATIONS = 3
SIZES = (2, 4, 8)
GENOME = Genome([FloatGene("number", 0, 1)])


def times(designs: int, generation: int) -> list[float]:
    drawn = torch.randn(designs, generator=torch.Generator().manual_seed(generation), dtype=torch.float64)
    return (MEAN_S * (SPREAD * drawn - SPREAD**2 / 2).exp()).tolist()


def worker(world: World) -> None:
    designs, is_last_slow = int(sys.argv[2]), sys.argv[3] == "slow"
    slowness = SLOWNESS if is_last_slow and world.rank == world.size - 1 else 1.0
    rows = torch.linspace(0, 1, designs, dtype=torch.float64)[:, None]
    seconds_of: dict[float, float] = {}

    def cost(design: dict[str, Any]) -> float:
        time.sleep(slowness * seconds_of[design["number"]])
        return float(design["number"])

    pool = EvaluationPool(
        Problem(GENOME, (Objective("cost"),), ScalarEvaluator(cost)), world, 0, EvaluationRecords(None, world)
    )
    for generation in range(GENERATIONS):
        seconds_of = dict(zip(rows.flatten().tolist(), times(designs, generation), strict=True))
        lockstep.barrier()
        started = time.perf_counter()
        pool.evaluate(rows, generation, DesignArchive(GENOME, 1))
        shared_s = time.perf_counter() - started
        lockstep.barrier()
        started = time.perf_counter()
        block = range(world.rank * designs // world.size, (world.rank + 1) * designs // world.size)
        all_gather_object([cost({"number": rows[row].item()}) for row in block])
        split_s = time.perf_counter() - started
        all_s = times(designs, generation)
        speed = world.size - 1 + 1 / (SLOWNESS if is_last_slow else 1.0)
        ideal_s = max(sum(all_s) / speed, max(all_s))
        if world.is_main:
            line = {"ideal_s": ideal_s, "shared_s": shared_s, "split_s": split_s}
            with Path(sys.argv[4]).open("a") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--designs", type=int, default=1024, help="designs per generation")
    designs = parser.parse_args().designs
    print(f"{designs} designs, {1e3 * MEAN_S:g} ms each on average, lognormal; median of {GENERATIONS} generations")
    print(f"{'processes':>9} {'ranks':>9} {'ideal s':>8} {'pool s':>8} {'of ideal':>9} {'blocks s':>9} {'of ideal':>9}")
    for ranks in ("equal", "slow"):
        for size in SIZES:
            lines = measure(size, ranks, designs)
            ideal, pool, blocks = (
                statistics.median(line[name] for line in lines) for name in ("ideal_s", "shared_s", "split_s")
            )
            of_pool, of_blocks = (
                statistics.median(line["ideal_s"] / line[name] for line in lines) for name in ("shared_s", "split_s")
            )
            words = "equal" if ranks == "equal" else "one slow"
            print(f"{size:>9} {words:>9} {ideal:8.2f} {pool:8.2f} {of_pool:9.3f} {blocks:9.2f} {of_blocks:9.3f}")


def measure(size: int, ranks: str, designs: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.jsonl"
        command = [sys.executable, "-m", "lockstep", "run", "-n", str(size), __file__, "worker", str(designs), ranks]
        subprocess.run([*command, str(file)], check=True)
        return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        lockstep.launch(worker)
    else:
        main()
