"""What the surrogate network saves: evaluations until a search reaches a given cost, with it and without.

    python bench/surrogate.py --problem rosenbrock [--jobs 14] [--seeds 12]
    python bench/surrogate.py --problem wing [--jobs 14] [--seeds 12]

Both arms are the same loop and the same evolution; without the network, no offspring is guided. A target is the median
of the best costs that the unguided search found after 100 generations of 64, over ten seeds that are not measured here:
`--calibrate` prints it, and TARGETS holds it. A seed that has not reached its target after 200 generations counts as
having needed all of their evaluations. `rastrigin`, whose valleys are many and whose genes are independent, is included
because it should be the hardest for the network.
"""

import argparse
import math
from collections.abc import Callable
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.events.event_log import Event
from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.genes import BASE
from lockstep.search.evaluators import VectorizedEvaluator
from lockstep.search.genome import FloatGene, Genome
from lockstep.search.problem import Objective, Problem
from lockstep.search.search_loop import Search, SearchSettings
from lockstep.search.surrogate_network import NetworkSettings
from lockstep.train.run import Run
from lockstep.world.keyed_random import keyed_generator
from lockstep.world.world import World

POPULATION = 64
TARGET_GENERATIONS = 100  # a target is what the unguided search reaches in this many
MAX_GENERATIONS = 200  # after this many, a search gives up
CALIBRATION_SEEDS = range(1000, 1010)
FIRST_SEED = 200
NUM_GENES = 20
TARGETS = {"rosenbrock": 52.856, "ackley": 0.257901, "rastrigin": 3.71996, "wing": -7.63683}


class Task(NamedTuple):
    problem: str
    seed: int
    guided_share: float
    target: float
    generations: int


class Outcome(NamedTuple):
    evaluations: int  # until the target was reached, or all
    is_reached: bool
    best: float
    surrogate_s: float  # per generation


class Landscape(NamedTuple):
    """What to search, and the design to start from."""

    genome: Genome
    costs: Callable[[Tensor], Tensor]
    base: dict[str, Any] | None = None


def shifted(function: Callable[[Tensor], Tensor], reach: float) -> Landscape:
    """A standard function of genes from −reach to reach, with a random optimum in the middle half."""
    genome = Genome([FloatGene(f"x{number}", -reach, reach) for number in range(NUM_GENES)])
    drawn = torch.rand(NUM_GENES, generator=keyed_generator(0, "shift"), dtype=torch.float64)
    shift = (drawn - 0.5) * reach
    return Landscape(genome, lambda designs: function(designs - shift)[:, None])


def rosenbrock(x: Tensor) -> Tensor:
    """The optimum is at 0, at the end of a curved valley."""
    x = x + 1
    return (100 * (x[:, 1:] - x[:, :-1] ** 2) ** 2 + (1 - x[:, :-1]) ** 2).sum(1)


def ackley(x: Tensor) -> Tensor:
    waves = (2 * math.pi * x).cos().mean(1).exp()
    return 20 + math.e - 20 * (-0.2 * x.square().mean(1).sqrt()).exp() - waves


def rastrigin(x: Tensor) -> Tensor:
    return (x.square() + 10 - 10 * (2 * math.pi * x).cos()).sum(1)


def landscape(problem: str) -> Landscape:
    if problem == "wing":
        assessor = Assessor()
        return Landscape(assessor.genome, lambda designs: -assessor.fitness(designs), dict(BASE))
    function, reach = {"rosenbrock": (rosenbrock, 2.048), "ackley": (ackley, 32.0), "rastrigin": (rastrigin, 5.12)}[
        problem
    ]
    return shifted(function, reach)


class SurrogateTime:
    """A sink that collects how long each generation took to evolve and train."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def emit(self, event: Event) -> None:
        if "generation" in event:
            self.seconds.append(event["evolve_s"] + event["train_s"])

    def close(self) -> None:
        pass


def search(task: Task) -> Outcome:
    """Search with the real loop, without a folder."""
    torch.set_num_threads(1)
    searched, surrogate_time = landscape(task.problem), SurrogateTime()
    settings = SearchSettings(
        population_size=POPULATION,
        max_generations=task.generations,
        target=task.target,
        network=NetworkSettings(guided_share=task.guided_share) if task.guided_share else None,
    )
    problem = Problem(searched.genome, (Objective("cost"),), VectorizedEvaluator(searched.costs, POPULATION))
    made = Search(Run(None, World(), seed=task.seed, sinks=[surrogate_time]), problem, settings)
    made.run_complete_pipeline(searched.base)
    reached = (made.archive.costs[:, 0] <= task.target).nonzero()
    return Outcome(
        evaluations=int(reached[0]) + 1 if len(reached) else len(made.archive),
        is_reached=len(reached) > 0,
        best=float(made.archive.costs.min()),
        surrogate_s=sum(surrogate_time.seconds) / len(surrogate_time.seconds),
    )


def calibrate(problem: str, jobs: int) -> None:
    outcomes = run([Task(problem, seed, 0.0, -math.inf, TARGET_GENERATIONS) for seed in CALIBRATION_SEEDS], jobs)
    median = np.median([each.best for each in outcomes])
    print(f"{problem}: median best after {TARGET_GENERATIONS} generations {median:.6g}")


def compare(problem: str, seeds: range, guided_share: float, jobs: int) -> None:
    target = TARGETS[problem]
    arms = {"without": 0.0, "with": guided_share}
    tasks = [Task(problem, seed, share, target, MAX_GENERATIONS) for seed in seeds for share in arms.values()]
    outcomes = run(tasks, jobs)
    by_arm = {name: outcomes[number :: len(arms)] for number, name in enumerate(arms)}
    print(f"{problem}: evaluations until a cost of {target:g}, {len(seeds)} seeds")
    print("| network | median | quartiles | never | surrogate, ms per generation |\n|---|---|---|---|---|")
    for name, each in by_arm.items():
        print(f"| {name} | {summary(each)} |")
    medians = {name: np.median([each.evaluations for each in arm]) for name, arm in by_arm.items()}
    print(f"with / without: {medians['with'] / medians['without']:.2f}")


def summary(outcomes: list[Outcome]) -> str:
    evaluations = [each.evaluations for each in outcomes]
    low, median, high = np.percentile(evaluations, [25, 50, 75])
    never = sum(not each.is_reached for each in outcomes)
    cost_ms = 1000 * np.median([each.surrogate_s for each in outcomes])
    return f"{median:.0f} | {low:.0f}–{high:.0f} | {never} | {cost_ms:.0f}"


def run(tasks: list[Task], jobs: int) -> list[Outcome]:
    with get_context("spawn").Pool(jobs) as pool:
        return pool.map(search, tasks, chunksize=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--problem", choices=TARGETS, default="rosenbrock")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--guided-share", type=float, default=NetworkSettings().guided_share)
    parser.add_argument("--calibrate", action="store_true")
    options = parser.parse_args()
    if options.calibrate:
        calibrate(options.problem, options.jobs)
    else:
        compare(options.problem, range(FIRST_SEED, FIRST_SEED + options.seeds), options.guided_share, options.jobs)


if __name__ == "__main__":
    main()
