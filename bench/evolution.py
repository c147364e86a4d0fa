"""The built-in evolution against pymoo: what it finds at equal evaluations, and what a generation costs.

    .venv/bin/python bench/evolution.py quality [--only zdt1 …]
    .venv/bin/python bench/evolution.py speed [--rounds 15]

One process, one thread. Quality: medians over the seeds below. Ours runs with the defaults of `EvolutionSettings` on
all problems. pymoo's GA (one cost) and NSGA2 (two) run with their defaults too, GA with populations of several sizes,
of which the best by its median is the bar. Both evaluate the same functions. Two costs are judged by the hypervolume of
the last population up to (1.1, 1.1). The bar is a median no worse than pymoo's on Rastrigin and ZDT1 to 3. The other
problems show whether that also holds if the optimum is neither in the middle nor at a bound, if genes depend on each
other, and if there is only one valley.

Speed: `ask` and `tell` at 10,000 designs of 50 genes against pymoo's `ask` and `tell` without its check for duplicates.
The bar is a ratio of 1.
"""

import argparse
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from pymoo.algorithms.moo.nsga2 import NSGA2
from pymoo.algorithms.soo.nonconvex.ga import GA
from pymoo.core.algorithm import Algorithm
from pymoo.core.evaluator import Evaluator
from pymoo.core.problem import Problem
from pymoo.core.termination import NoTermination
from pymoo.indicators.hv import HV
from pymoo.optimize import minimize
from pymoo.problems.static import StaticProblem
from torch import Tensor

from lockstep.bench.interleaved_timing import interleave, timing_table
from lockstep.search.evolution import Evolution, EvolutionSettings
from lockstep.search.genome import FloatGene, Genome
from lockstep.world.keyed_random import keyed_generator

SEEDS = range(101, 112)
EVALUATIONS_OF_ONE_COST = 20_000
EVALUATIONS_OF_TWO_COSTS = 10_000
PYMOO_POPULATIONS = (50, 100, 200)  # of GA; NSGA2 has 100, as ours
REFERENCE = np.array([1.1, 1.1])


class Case(NamedTuple):
    genome: Genome
    function: Callable[[Tensor], Tensor]
    num_objectives: int = 1
    is_bar: bool = False

    @property
    def evaluations(self) -> int:
        return EVALUATIONS_OF_ONE_COST if self.num_objectives == 1 else EVALUATIONS_OF_TWO_COSTS


def genome(num_genes: int, low: float, high: float) -> Genome:
    return Genome([FloatGene(f"x{number}", low, high) for number in range(num_genes)])


def rastrigin(designs: Tensor) -> Tensor:
    return (10 + designs**2 - 10 * torch.cos(2 * math.pi * designs)).sum(1, keepdim=True)


def sphere(designs: Tensor) -> Tensor:
    return designs.square().sum(1, keepdim=True)


def rosenbrock(designs: Tensor) -> Tensor:
    here, following = designs[:, :-1], designs[:, 1:]
    return (100 * (following - here**2) ** 2 + (1 - here) ** 2).sum(1, keepdim=True)


def moved(function: Callable[[Tensor], Tensor], num_genes: int, *, turned: bool) -> Callable[[Tensor], Tensor]:
    """Move the optimum and, with `turned`, rotate the space so that genes depend on each other."""
    generator = keyed_generator(0, "problem")
    shift = 6 * torch.rand(num_genes, generator=generator, dtype=torch.float64) - 3
    turn = torch.linalg.qr(torch.randn(num_genes, num_genes, generator=generator, dtype=torch.float64)).Q
    return lambda designs: function((designs - shift) @ turn if turned else designs - shift)


def zdt(number: int, optimum: float = 0.0) -> Callable[[Tensor], Tensor]:
    """Zitzler, Deb and Thiele's problem `number`. All genes but the first are best at `optimum`, originally 0."""

    def costs(designs: Tensor) -> Tensor:
        first, others = designs[:, 0], designs[:, 1:]
        scale = 1 + 9 * (others - optimum).abs().mean(1)
        share = first / scale
        shape = 1 - share**2 if number == 2 else 1 - share.sqrt()
        if number == 3:
            shape = shape - share * torch.sin(10 * math.pi * first)
        return torch.stack([first, scale * shape], 1)

    return costs


CASES = {
    "rastrigin": Case(genome(30, -5.12, 5.12), rastrigin, is_bar=True),
    "zdt1": Case(genome(30, 0, 1), zdt(1), 2, is_bar=True),
    "zdt2": Case(genome(30, 0, 1), zdt(2), 2, is_bar=True),
    "zdt3": Case(genome(30, 0, 1), zdt(3), 2, is_bar=True),
    "rastrigin, moved": Case(genome(30, -5.12, 5.12), moved(rastrigin, 30, turned=False)),
    "rastrigin, moved and turned": Case(genome(20, -5.12, 5.12), moved(rastrigin, 20, turned=True)),
    "sphere, moved": Case(genome(30, -5.12, 5.12), moved(sphere, 30, turned=False)),
    "rosenbrock": Case(genome(10, -2.048, 2.048), rosenbrock),
    "zdt1, optimum inside": Case(genome(30, 0, 1), zdt(1, 0.3), 2),
    "zdt2, optimum inside": Case(genome(30, 0, 1), zdt(2, 0.3), 2),
}


class PymooProblem(Problem):
    def __init__(self, case: Case) -> None:
        bounds = {"xl": case.genome.low.numpy(), "xu": case.genome.high.numpy()}
        super().__init__(n_var=len(case.genome), n_obj=case.num_objectives, **bounds)
        self.function = case.function

    def _evaluate(self, x: np.ndarray, out: dict, *_: object, **__: object) -> None:
        out["F"] = self.function(torch.from_numpy(x)).numpy()


def by_ours(case: Case, seed: int) -> np.ndarray:
    settings = EvolutionSettings()
    strategy = Evolution(case.genome, case.num_objectives, settings, seed)
    for generation in range(case.evaluations // settings.population_size):
        designs = strategy.ask(settings.population_size, generation)
        strategy.tell(designs, case.function(designs))
    return strategy.costs.numpy()


def by_pymoo(case: Case, seed: int, population: int) -> np.ndarray:
    algorithm = (GA if case.num_objectives == 1 else NSGA2)(pop_size=population)
    result = minimize(PymooProblem(case), algorithm, ("n_eval", case.evaluations), seed=seed)
    assert result.algorithm.evaluator.n_eval == case.evaluations
    return result.pop.get("F")


def score(costs: np.ndarray) -> float:
    """The best cost, or the hypervolume."""
    return float(costs.min()) if costs.shape[1] == 1 else float(HV(REFERENCE)(costs))


def compare(name: str, case: Case) -> bool:
    """Print a row per contestant; return whether ours is no worse."""
    populations = PYMOO_POPULATIONS if case.num_objectives == 1 else (100,)
    scores = {"ours": [score(by_ours(case, seed)) for seed in SEEDS]}
    for population in populations:
        scores[f"pymoo, {population}"] = [score(by_pymoo(case, seed, population)) for seed in SEEDS]
    for who, values in scores.items():
        print(
            f"| {name} | {who} | {statistics.median(values):.5g} | {min(values):.5g} – {max(values):.5g} |", flush=True
        )
    own, *others = (statistics.median(values) for values in scores.values())
    return own <= min(others) if case.num_objectives == 1 else own >= max(others)


def quality(only: list[str]) -> None:
    print("best cost, or hypervolume (two costs: larger is better)\n| problem | | median | range |\n|---|---|---|---|")
    verdicts = {name: compare(name, case) for name, case in CASES.items() if not only or name in only}
    for name, is_no_worse in verdicts.items():
        bar = "bar: " if CASES[name].is_bar else ""
        print(f"{bar}{name}: ours is {'no worse' if is_no_worse else 'WORSE'} in the median")


def our_generation(case: Case, size: int, costs: Tensor) -> Callable[[], None]:
    strategy = Evolution(case.genome, case.num_objectives, EvolutionSettings(population_size=size), 1)
    generation = 0

    def run() -> None:
        nonlocal generation
        strategy.tell(strategy.ask(size, generation), costs[generation])
        generation += 1

    run()  # the first generation is sampled, not bred
    return run


def pymoo_generation(case: Case, size: int, costs: Tensor) -> Callable[[], None]:
    algorithm: Algorithm = (GA if case.num_objectives == 1 else NSGA2)(pop_size=size, eliminate_duplicates=False)
    algorithm.setup(PymooProblem(case), termination=NoTermination(), seed=1)
    generation = 0

    def run() -> None:
        nonlocal generation
        designs = algorithm.ask()
        Evaluator().eval(StaticProblem(algorithm.problem, F=costs[generation].numpy()), designs)
        algorithm.tell(infills=designs)
        generation += 1

    run()
    return run


def speed(rounds: int, size: int = 10_000) -> None:
    """Time generations with costs that are drawn at random, and improve, so that no time is spent on a function."""
    for num_objectives in (1, 2):
        case = Case(genome(50, -1, 1), sphere, num_objectives)
        drawn = torch.rand(rounds + 2, size, num_objectives, generator=keyed_generator(0, "costs"), dtype=torch.float64)
        costs = drawn - 0.05 * torch.arange(rounds + 2)[:, None, None]
        variants = {
            "pymoo": pymoo_generation(case, size, costs),
            "ours": our_generation(case, size, costs),
        }
        timings = interleave(variants, rounds, 1)
        print(timing_table(f"a generation, {size} × 50 genes, costs: {num_objectives}", timings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    parts.add_parser("quality").add_argument("--only", nargs="+", choices=CASES, default=[], metavar="PROBLEM")
    parts.add_parser("speed").add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.part == "quality":
        quality(options.only)
    else:
        speed(options.rounds)


if __name__ == "__main__":
    main()
