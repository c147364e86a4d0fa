"""The wing recipe's fitness over random designs, and the cost of an evaluation.

    .venv/bin/python bench/wing_landscape.py [--designs 2000] [--rounds 9]

designs   how many of N random designs fail, how many are legal, and the quantiles of their fitness
panels    the fitness of the same wing with more panels
cost      processor time per design, by the number evaluated at a time; each number once per round
"""

import argparse
import statistics
import time

import torch

from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.genes import BASE
from lockstep.world.keyed_random import keyed_generator

SEED = 0
AT_A_TIME = (1, 16, 64)
PANELS = (24, 40, 60, 120)
QUANTILES = (0.0, 0.1, 0.5, 0.9, 0.99)


def show_designs(num_designs: int) -> None:
    assessor = Assessor()
    base = assessor.assess(assessor.genome.row(BASE).unsqueeze(0))
    print(f"base: fitness {base.fitness.item():.3f}, downforce {base.loads.downforce.item():.0f} N, ", end="")
    print(f"drag {base.loads.drag.item():.0f} N, {'legal' if base.is_legal.item() else 'not legal'}")
    designs = assessor.genome.sample(num_designs, keyed_generator(SEED, "landscape"))
    found = [assessor.assess(some) for some in torch.split(designs, 64)]
    fitness, is_legal = (
        torch.cat(parts) for parts in zip(*((each.fitness, each.is_legal) for each in found), strict=True)
    )
    is_good = fitness.isfinite()
    print(f"{num_designs} random designs: {int((~is_good).sum())} failed, {int(is_legal.sum())} legal, ", end="")
    print(f"{int((fitness > base.fitness).sum())} better than the base; best {fitness[is_good].max().item():.3f}")
    spread = fitness[is_good].quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    print(
        "fitness at " + ", ".join(f"{share:.0%}: {value:.2f}" for share, value in zip(QUANTILES, spread, strict=True))
    )


def show_panels() -> None:
    for panels in PANELS:
        assessor = Assessor(panels)
        found = assessor.assess(assessor.genome.row(BASE).unsqueeze(0))
        print(f"{panels:4} panels per element: fitness {found.fitness.item():.3f}, ", end="")
        print(f"downforce {found.loads.downforce.item():.0f} N, drag {found.loads.drag.item():.0f} N")


def show_cost(rounds: int) -> None:
    assessor = Assessor()
    designs = assessor.genome.sample(64, keyed_generator(SEED, "cost"))
    seconds: dict[int, list[float]] = {size: [] for size in AT_A_TIME}
    for number in range(rounds + 1):
        for size, values in seconds.items():
            began = time.process_time()
            for some in torch.split(designs, size):
                assessor.fitness(some)
            if number:  # the first round warms up
                values.append((time.process_time() - began) / len(designs))
    for size, values in seconds.items():
        median, low, high = (1e3 * choose(values) for choose in (statistics.median, min, max))
        print(f"{size:4} at a time: {median:.2f} ms per design ({low:.2f} … {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--designs", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    show_designs(options.designs)
    show_panels()
    show_cost(options.rounds)


if __name__ == "__main__":
    main()
