"""Recipes by name, and configs together with the recipe they name."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.config.draft import Draft, read
from lockstep.config.job import JobConfig
from lockstep.config.schema import Config
from lockstep.config.search import SearchConfig
from lockstep.errors import ConfigError, UserError

if TYPE_CHECKING:  # it loads torch, and a mistake in a config should be told sooner
    from lockstep.search.recipe import SearchRecipe
    from lockstep.train.recipe import Recipe

_FOLDER = Path(__file__).parent

# What a recipe has, that is trained or searched.
_TRAINED = ("config_class", "model", "data", "loss", "metrics")
_SEARCHED = ("config_class", "problem")


def load_recipe(config: str, overrides: Sequence[str] = ()) -> "tuple[Recipe | SearchRecipe, JobConfig]":
    """A recipe and its checked settings, from a YAML file or a built-in recipe's name."""
    path = Path(config)
    if not path.is_file() and (builtin := default_config(config)) is not None:
        path = builtin
    elif not path.exists() and not path.suffix:
        raise ConfigError([f"{config}: neither a file nor a built-in recipe ({', '.join(builtin_names())})"])
    draft = read(path, overrides, builtin=default_config)
    name = draft.values.get("recipe")
    if not isinstance(name, str):
        raise ConfigError(_faults_without_a_recipe(draft))
    recipe = find(name, draft.origin("recipe"))
    return recipe, draft.check(recipe.config_class)


def load_training_recipe(config: str, overrides: Sequence[str] = ()) -> "tuple[Recipe, Config]":
    """The same for what only a recipe that is trained has."""
    recipe, settings = load_recipe(config, overrides)
    if not isinstance(settings, Config):
        raise UserError(f"{config} is searched, not trained: it has no batches")
    return cast("Recipe", recipe), settings


def load_search_recipe(config: str, overrides: Sequence[str] = ()) -> "tuple[SearchRecipe, SearchConfig]":
    recipe, settings = load_recipe(config, overrides)
    if not isinstance(settings, SearchConfig):
        raise UserError(f"{config} is trained, not searched: it has no genome")
    return cast("SearchRecipe", recipe), settings


def _faults_without_a_recipe(draft: Draft) -> list[str]:
    faults = []
    if draft.values.get("recipe") is None:
        known = ", ".join(builtin_names())
        faults.append(f"{draft.origin('recipe')}: recipe: missing; expected {known} or package.module:name")
    try:
        draft.check(Config)
    except ConfigError as error:
        faults += error.problems
    return faults


def builtin_names() -> list[str]:
    return sorted(path.parent.name for path in _FOLDER.glob("*/*.yaml"))


def default_config(name: str) -> Path | None:
    """The default YAML of a built-in recipe, or None if there is no such recipe."""
    return _FOLDER / name / f"{name}.yaml" if name in builtin_names() else None


def find(name: str, origin: str) -> "Recipe | SearchRecipe":
    """The recipe a config names: a built-in one, or `package.module:name` of the user's own."""
    if name in builtin_names():
        module, attribute = f"lockstep.recipes.{name}.recipe", "recipe"
    else:
        module, _, attribute = name.partition(":")
    if not (module and attribute):
        known = ", ".join(builtin_names())
        raise ConfigError([f"{origin}: recipe: expected {known} or package.module:name, got {name[:60]!r}"])
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as `python -m lockstep` has it: a recipe may stand beside its config
    try:
        recipe: Recipe | SearchRecipe = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's module does when it is imported
        raise ConfigError(
            [f"{origin}: recipe: {name}: {type(error).__name__}: {' '.join(str(error).split())}"]
        ) from None
    parts, base = (_SEARCHED, SearchConfig) if hasattr(recipe, "problem") else (_TRAINED, Config)
    missing = [part for part in parts if not hasattr(recipe, part)]
    if missing:
        raise ConfigError([f"{origin}: recipe: {name} is not a recipe: it has no {', '.join(missing)}"])
    if not (isinstance(recipe.config_class, type) and issubclass(recipe.config_class, base)):
        raise ConfigError([f"{origin}: recipe: {name}: its config_class is not a lockstep.{base.__name__}"])
    return recipe
