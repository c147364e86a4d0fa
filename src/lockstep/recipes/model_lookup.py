"""Look up models by name, including those of the built-in recipes: `get_model("vae")(config)`."""

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.errors import UserError
from lockstep.train import model_registry
from lockstep.train.model_registry import ModelFactory
from lockstep.train.recipe import recipe_for_run

if TYPE_CHECKING:
    from lockstep.config.job_schema import JobConfig


def get_model(name: str) -> ModelFactory:
    """Return a function from a config to a new model: a registered one, or that of a built-in recipe.

    A model registered with `register_model` takes precedence over a recipe of the same name.
    """
    if model_registry.is_registered(name):
        return model_registry.registered_model(name)
    # Imported here because it loads pydantic and YAML, which registered models do not need.
    from lockstep.recipes.registry import builtin_names

    if name in builtin_names():
        return partial(_model_of_recipe, name)
    return model_registry.registered_model(name, also=builtin_names())


def _model_of_recipe(name: str, config: "JobConfig") -> nn.Module:
    """Make the model as `lockstep train` does. A plain `Config` is accepted if the recipe's own config accepts it."""
    from lockstep.config.config_file import ConfigDraft
    from lockstep.config.resolved_config import dump_config
    from lockstep.config.yaml_document import parse_yaml_mapping
    from lockstep.recipes.registry import find_recipe

    recipe: Any = find_recipe(name, "get_model")
    if not hasattr(recipe, "model"):
        raise UserError(f"get_model({name!r}): {name} is searched, not trained: it has no model")
    if not isinstance(config, recipe.config_class):
        config = ConfigDraft(parse_yaml_mapping(dump_config(config), f"get_model({name!r})")).check(recipe.config_class)
    model: nn.Module = recipe_for_run(config, recipe).model(config)  # type: ignore[arg-type]
    return model
