"""One search of a recipe, from its config to the best design in a run folder; the same code on every rank."""

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.config.search import NetworkConfig, SearchConfig
from lockstep.errors import UserError
from lockstep.events.event import Sink
from lockstep.events.run_folder import RunFolder
from lockstep.search.evolution import EvolutionSettings
from lockstep.search.network_settings import NetworkSettings, Stage
from lockstep.search.problem import Problem
from lockstep.search.recipe import SearchRecipe, base_of
from lockstep.search.search import Search, SearchResult, SearchSettings
from lockstep.train.continuity import Resume
from lockstep.train.job import open_run
from lockstep.world.world import World

_QUICK_GENERATIONS = 3
_QUICK_POPULATION = 16


def search_recipe(
    recipe: SearchRecipe,
    config: SearchConfig,
    world: World,
    folder: RunFolder,
    sinks: Sequence[Sink],
    *,
    resume: Resume = "auto",
    stop_after: int | None = None,
    base_params: Mapping[str, Any] | None = None,
) -> SearchResult:
    """Search, or go on where the folder says. `base_params`: genes of the design to begin with, over the recipe's."""
    problem = recipe.problem(config)  # before the folder is claimed: a mistake found here leaves no trace
    if not isinstance(problem, Problem):
        raise UserError(f"{config.recipe}: expected a lockstep.Problem from its problem(config), got {problem!r}")
    run = open_run(config, world, folder, sinks, resume=resume, stop_after=stop_after, seed=config.seed)
    search = Search(run, problem, settings_of(config))
    if (conclude := getattr(recipe, "conclude", None)) is not None:
        search.before_the_end = lambda: conclude(search, config)
    base = {**(base_of(recipe, config) or {}), **(base_params or {})}
    return search.run_complete_pipeline(base or None)


def settings_of(config: SearchConfig) -> SearchSettings:
    population = min(config.population_size, _QUICK_POPULATION) if config.quick else config.population_size
    stopping = config.early_stopping
    return SearchSettings(
        population_size=population,
        max_generations=min(config.max_generations, _QUICK_GENERATIONS) if config.quick else config.max_generations,
        save_frequency=config.save_frequency,
        keep=config.keep_checkpoints,
        max_runtime_s=None if config.max_runtime_hours is None else 3600 * config.max_runtime_hours,
        patience=None if stopping is None else stopping.patience,
        min_delta=0.0 if stopping is None else stopping.min_delta,
        target=None if stopping is None else stopping.target,
        evolution=EvolutionSettings(**dict(config.evolution)),
        network=None if config.network is None else _network(config.network),
    )


def _network(config: NetworkConfig) -> NetworkSettings:
    stages = tuple(Stage(**dict(stage)) for stage in config.curriculum)
    return NetworkSettings(**{**dict(config), "curriculum": stages})
