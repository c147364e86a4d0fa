"""Search recipes: their protocol, and how one is run from its config."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from lockstep.config.folder_remedies import IN_COMMAND, FolderRemedies
from lockstep.config.search_schema import NetworkConfig, SearchConfig
from lockstep.errors import UserError
from lockstep.events.event_log import Sink
from lockstep.events.run_folder import RunFolder
from lockstep.search.evolution import EvolutionSettings
from lockstep.search.problem import Problem
from lockstep.search.search_loop import Search, SearchResult, SearchSettings
from lockstep.search.surrogate_network import CurriculumStage, NetworkSettings
from lockstep.train.resume.checkpointer import Resume
from lockstep.train.train_job import open_run
from lockstep.world.world import World

_QUICK_GENERATIONS = 3
_QUICK_POPULATION = 16


class SearchRecipe(Protocol):
    """A problem and the class of its config. Any object with these attributes is a recipe; subclassing is optional.

    A recipe may also have `base(config)`, which returns the design to start with, by gene; and `conclude(search,
    config)`, which is called on every rank after the last generation, before the run is closed: to draw pictures, say.
    """

    config_class: ClassVar[type[SearchConfig]]

    def problem(self, config: Any) -> Problem:
        """Return what to search for."""
        ...


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
    remedies: FolderRemedies = IN_COMMAND,
) -> SearchResult:
    """Run the search of a recipe, or resume it; all ranks call this.

    Args:
        recipe: the problem.
        config: its checked settings.
        world: this process's place in the job.
        folder: where the run is saved.
        sinks: where events go besides the folder.
        resume: whether to resume what is in the folder.
        stop_after: save and stop after this generation.
        base_params: genes of the design to start with; they override those of the recipe's `base`.
        remedies: what messages about the folder tell whoever started the search.
    """
    problem = recipe.problem(config)  # before the folder is claimed: a mistake found here leaves no trace
    if not isinstance(problem, Problem):
        raise UserError(
            f"{config.recipe}: expected a lockstep.search.Problem from its problem(config), got {problem!r}"
        )
    run = open_run(
        config, world, folder, sinks, resume=resume, stop_after=stop_after, remedies=remedies, seed=config.seed
    )
    search = Search(run, problem, build_search_settings(config))
    if (conclude := getattr(recipe, "conclude", None)) is not None:
        search.on_end = lambda: conclude(search, config)
    base = {**_base_design(recipe, config), **(base_params or {})}
    return search.run_complete_pipeline(base or None)


def build_search_settings(config: SearchConfig) -> SearchSettings:
    """Convert a config to settings; with `quick`, for a search of seconds."""
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
        network=None if config.network is None else _network_settings(config.network),
    )


def _network_settings(config: NetworkConfig) -> NetworkSettings:
    stages = tuple(CurriculumStage(**dict(stage)) for stage in config.curriculum)
    return NetworkSettings(**{**dict(config), "curriculum": stages})


def _base_design(recipe: SearchRecipe, config: SearchConfig) -> Mapping[str, Any]:
    make_base = getattr(recipe, "base", None)
    base = None if make_base is None else make_base(config)
    if not (base is None or isinstance(base, Mapping)):
        raise UserError(f"{config.recipe}: expected a design by gene from its base(config), got {base!r}")
    return base or {}
