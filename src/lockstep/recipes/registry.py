"""Find recipes by name, check their configs, and run them.

A built-in recipe is a folder here: its `__init__.py` has the `config_class`, its `recipe.py` the `recipe`. They are
separate because `recipe.py` imports torch, and a launcher checks the config without it.
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.config.config_file import ConfigDraft, read_config
from lockstep.config.job_schema import JobConfig
from lockstep.config.search_schema import SearchConfig
from lockstep.config.train_schema import Config
from lockstep.errors import ConfigError, UserError

if TYPE_CHECKING:  # these import torch
    from lockstep.events.event_log import Sink
    from lockstep.events.run_folder import RunFolder
    from lockstep.search.search_job import SearchRecipe
    from lockstep.train.recipe import Recipe
    from lockstep.train.resume.checkpointer import Resume
    from lockstep.world.world import World

_FOLDER = Path(__file__).parent

# The attributes that a recipe must have, to be trained or to be searched.
_TRAINING_ATTRIBUTES = ("config_class", "model", "data", "loss", "metrics")
_SEARCH_ATTRIBUTES = ("config_class", "problem")


def load_config(config: str, overrides: Sequence[str] = ()) -> JobConfig:
    """Return the checked config of a YAML file or a built-in recipe; for a built-in one, torch is not imported."""
    draft, name = _read_draft(config, overrides)
    if name in builtin_names():
        config_class: type[JobConfig] = importlib.import_module(f"lockstep.recipes.{name}").config_class
        return draft.check(config_class)
    return draft.check(find_recipe(name, draft.origin("recipe")).config_class)


def load_recipe(config: str, overrides: Sequence[str] = ()) -> "tuple[Recipe | SearchRecipe, JobConfig]":
    """Return the recipe and its checked config, given a YAML file or the name of a built-in recipe."""
    draft, name = _read_draft(config, overrides)
    recipe = find_recipe(name, draft.origin("recipe"))
    return recipe, draft.check(recipe.config_class)


def load_training_recipe(config: str, overrides: Sequence[str] = ()) -> "tuple[Recipe, Config]":
    """Like `load_recipe`, but refuse a recipe that is searched."""
    recipe, settings = load_recipe(config, overrides)
    if not isinstance(settings, Config):
        raise UserError(f"{config} is searched, not trained: it has no batches")
    return cast("Recipe", recipe), settings


def load_search_recipe(config: str, overrides: Sequence[str] = ()) -> "tuple[SearchRecipe, SearchConfig]":
    """Like `load_recipe`, but refuse a recipe that is trained."""
    recipe, settings = load_recipe(config, overrides)
    if not isinstance(settings, SearchConfig):
        raise UserError(f"{config} is trained, not searched: it has no genome")
    return cast("SearchRecipe", recipe), settings


def run_recipe(
    recipe: "Recipe | SearchRecipe",
    config: JobConfig,
    world: "World",
    folder: "RunFolder",
    sinks: "Sequence[Sink]",
    *,
    resume: "Resume" = "auto",
    stop_after: int | None = None,
) -> None:
    """Train or search, whichever the config is for; all ranks call this.

    Args:
        recipe: what `load_recipe` returned.
        config: its config.
        world: this process's place in the job.
        folder: where the run is saved.
        sinks: where events go besides the folder.
        resume: whether to resume what is in the folder.
        stop_after: save and stop after this step or generation.
    """
    if isinstance(config, SearchConfig):
        from lockstep.search.search_job import search_recipe

        search_recipe(cast("SearchRecipe", recipe), config, world, folder, sinks, resume=resume, stop_after=stop_after)
    else:
        from lockstep.train.train_job import train_recipe

        assert isinstance(config, Config)
        train_recipe(cast("Recipe", recipe), config, world, folder, sinks, resume=resume, stop_after=stop_after)


def builtin_names() -> list[str]:
    """Return the names of the built-in recipes."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/*.yaml"))


def default_config(name: str) -> Path | None:
    """Return the YAML file of a built-in recipe, or None if there is no such recipe."""
    return _FOLDER / name / f"{name}.yaml" if name in builtin_names() else None


def find_recipe(name: str, origin: str) -> "Recipe | SearchRecipe":
    """Return the recipe that a config names: a built-in one, or the user's `package.module:name`.

    `origin`: where the name was given, for error messages.
    """
    if name in builtin_names():
        module, attribute = f"lockstep.recipes.{name}.recipe", "recipe"
    else:
        module, _, attribute = name.partition(":")
    if not (module and attribute):
        known = ", ".join(builtin_names())
        raise ConfigError([f"{origin}: recipe: expected {known} or package.module:name, got {name[:60]!r}"])
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as under `python -m lockstep`: the recipe may be a module in this folder
    try:
        recipe: Recipe | SearchRecipe = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything when imported
        raise ConfigError(
            [f"{origin}: recipe: {name}: {type(error).__name__}: {' '.join(str(error).split())}"]
        ) from None
    is_search = hasattr(recipe, "problem")
    required, base = (_SEARCH_ATTRIBUTES, SearchConfig) if is_search else (_TRAINING_ATTRIBUTES, Config)
    missing = [attribute for attribute in required if not hasattr(recipe, attribute)]
    if missing:
        raise ConfigError([f"{origin}: recipe: {name} is not a recipe: it has no {', '.join(missing)}"])
    if not (isinstance(recipe.config_class, type) and issubclass(recipe.config_class, base)):
        raise ConfigError([f"{origin}: recipe: {name}: its config_class is not a lockstep.{base.__name__}"])
    return recipe


def _read_draft(config: str, overrides: Sequence[str]) -> tuple[ConfigDraft, str]:
    """Return the unchecked config, and the name of its recipe."""
    path = Path(config)
    if not path.is_file() and (builtin := default_config(config)) is not None:
        path = builtin
    elif not path.exists() and not path.suffix:
        raise ConfigError([f"{config}: neither a file nor a built-in recipe ({', '.join(builtin_names())})"])
    draft = read_config(path, overrides, builtin=default_config)
    name = draft.values.get("recipe")
    if not isinstance(name, str):
        raise ConfigError(_problems_without_a_recipe(draft))
    return draft, name


def _problems_without_a_recipe(draft: ConfigDraft) -> list[str]:
    """Check the config as far as that is possible without its recipe."""
    problems = []
    if draft.values.get("recipe") is None:
        known = ", ".join(builtin_names())
        problems.append(f"{draft.origin('recipe')}: recipe: missing; expected {known} or package.module:name")
    try:
        draft.check(Config)
    except ConfigError as error:
        problems += error.problems
    return problems
