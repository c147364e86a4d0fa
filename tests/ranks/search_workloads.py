"""A small search with a network, for any number of ranks."""

from typing import Any

import torch
from torch import Tensor

from lockstep.search.evaluators import ScalarEvaluator, VectorizedEvaluator
from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene
from lockstep.search.problem import Objective, Problem
from lockstep.search.search_loop import Search, SearchSettings
from lockstep.search.surrogate_network import NetworkSettings
from lockstep.train.run import Run
from lockstep.world.world import World

GENOME = Genome(
    [
        *[FloatGene(f"x{number}", -5, 5, group=f"g{number // 3}") for number in range(6)],
        IntegerGene("count", 1, 4, group="rest"),
        ChoiceGene("kind", ("plain", "noisy", "broken"), group="rest"),
    ]
)


def cost_of(design: dict[str, Any]) -> float:
    """Return the costs: some designs fail, and some have noise that depends on the design."""
    if design["kind"] == "broken" and design["x0"] > 0:
        raise ZeroDivisionError("no such wing")
    noise = torch.rand(()).item() if design["kind"] == "noisy" else 0.0
    return sum(value**2 for name, value in design.items() if name.startswith("x")) + design["count"] + noise


def costs_of(designs: Tensor) -> Tensor:
    costs = torch.stack([designs[:, :6].square().sum(1), (designs[:, :6] - 1).square().sum(1)], 1)
    return torch.where(designs[:, 7:8] == 2, torch.nan, costs) + 0.1 * torch.rand(len(designs), 1)


ONE = Problem(GENOME, (Objective("cost"),), ScalarEvaluator(cost_of))


NETWORK = NetworkSettings(steps=8, global_batch=32, lanes=4)


SEVERAL = Problem(GENOME, (Objective("left"), Objective("right", "max")), VectorizedEvaluator(costs_of, batch=5))


def searched(
    world: World, folder: str, problem: str, generations: int = 4, network: NetworkSettings = NETWORK
) -> tuple[str, list[Any]]:
    settings = SearchSettings(population_size=13, max_generations=generations, network=network)
    search = Search(Run(folder, world, seed=5, sinks=[]), {"one": ONE, "several": SEVERAL}[problem], settings)
    result = search.run_complete_pipeline()
    return result.digest, [result.best, result.evaluations, result.failures, len(result.front)]
