"""Find recipes by name, check their configs, and run them.

A built-in recipe is a folder here: its `__init__.py` has the `config_class`, its `recipe.py` the `recipe`. They are
separate because `recipe.py` imports torch, and a launcher checks the config without it.
"""

import importlib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.config.config_file import COMMAND_LINE, ConfigDraft, read_config
from lockstep.config.job_schema import JobConfig
from lockstep.config.named_object import import_named
from lockstep.config.optimizer_settings import OWN_SETTINGS, owners_of
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
_CONFIG_OF_RUN = "config.yaml"  # in a run folder

# The attributes that a recipe must have, to be trained or to be searched.
_TRAINING_ATTRIBUTES = ("config_class", "model", "data", "loss", "metrics")
_SEARCH_ATTRIBUTES = ("config_class", "problem")


def load_config(config: str, overrides: Sequence[str] = ()) -> JobConfig:
    """Return the checked config of a YAML file or a built-in recipe; for a built-in one, torch is not imported."""
    draft, name = _read_draft(config, overrides)
    if name in builtin_names():
        config_class = _config_class(name)
    else:
        config_class = find_recipe(name, draft.origin("recipe")).config_class
    return _check(draft, config_class)


def builtin_config_class(config: str) -> type[JobConfig]:
    """Return the class of a config without importing code that it names: for a recipe of the user's, `Config`."""
    _, name = _read_draft(config, ())
    return _config_class(name) if name in builtin_names() else Config


def load_recipe(config: str, overrides: Sequence[str] = ()) -> "tuple[Recipe | SearchRecipe, JobConfig]":
    """Return the recipe and its checked config, given a YAML file or the name of a built-in recipe."""
    draft, name = _read_draft(config, overrides)
    recipe = find_recipe(name, draft.origin("recipe"))
    return recipe, _check(draft, recipe.config_class)


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
        raise ConfigError(
            [f"{origin}: recipe: expected {known} or package.module:name, got {name[:60]!r}{_similar(name)}"]
        )
    try:
        recipe: Recipe | SearchRecipe = import_named(f"{module}:{attribute}")
    except UserError as error:
        raise ConfigError([f"{origin}: recipe: {error}"]) from None
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
        known = ", ".join(builtin_names())
        raise ConfigError([f"{config}: neither a file nor a built-in recipe ({known}){_similar(config)}"])
    elif path.suffix == ".py":
        raise ConfigError([f"{config} is a script, not a config: `lockstep run {config}` runs it"])
    elif (path / _CONFIG_OF_RUN).is_file():
        raise ConfigError(
            [f"{config} is a run folder: to continue its run, `lockstep train {path / _CONFIG_OF_RUN} --run {config}`"]
        )
    draft = read_config(path, overrides, builtin=default_config)
    name = draft.values.get("recipe")
    if not isinstance(name, str):
        raise ConfigError(_problems_without_a_recipe(draft))
    return draft, name


def _unused_overrides(draft: ConfigDraft, config: Config) -> list[str]:
    """Name the overrides that set another optimizer's setting. In a file, or a base of it, they may be left over."""
    own = OWN_SETTINGS.get(config.optim.name, ())
    others = {setting for settings in OWN_SETTINGS.values() for setting in settings if setting not in own}
    return [
        f"{COMMAND_LINE}: optim.{setting}: only for {owners_of(setting)}, and optim.name is {config.optim.name}"
        for setting in sorted(others)
        if draft.root.has_value_at(("optim", setting)) and draft.origin(f"optim.{setting}") == COMMAND_LINE
    ]


def _similar(name: str) -> str:
    near = get_close_matches(name, builtin_names(), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _config_class(name: str) -> type[JobConfig]:
    """Return the class of a built-in recipe's config, without importing torch."""
    found: type[JobConfig] = importlib.import_module(f"lockstep.recipes.{name}").config_class
    return found


def _check(draft: ConfigDraft, config_class: type[JobConfig]) -> JobConfig:
    """Check the config against its class and, where that alone does not tell, its optimizer's arguments."""
    config = draft.check(config_class)
    if isinstance(config, Config) and (unused := _unused_overrides(draft, config)):
        raise ConfigError(unused)
    # Torch is imported only for an optimizer that the schema does not describe; a launcher imports it anyway.
    if isinstance(config, Config) and (config.optim.name not in OWN_SETTINGS or config.optim.arguments.model_extra):
        from lockstep.train.optim.optimizer_classes import optimizer_problems

        problems = [
            f"{draft.origin(f'optim.{key}')}: optim.{key}: {problem}"
            for key, problem in optimizer_problems(config.optim)
        ]
        if problems:
            raise ConfigError(problems)
    return config


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
