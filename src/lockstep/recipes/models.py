"""Models by name, those of the built-in recipes among them: `get_model("vae")(config)`."""

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.errors import UserError
from lockstep.train import model_registry
from lockstep.train.model_registry import MakesModel
from lockstep.train.recipe import made_for

if TYPE_CHECKING:
    from lockstep.config.job import JobConfig


def get_model(name: str) -> MakesModel:
    """What was registered under this name, or the model of the built-in recipe of this name: call it with a config.

    A name that the user has registered is the user's, also where a recipe has it too.
    """
    if model_registry.is_registered(name):
        return model_registry.get_model(name)
    # Here, because it loads pydantic and YAML: models of one's own do without.
    from lockstep.recipes.registry import builtin_names

    if name in builtin_names():
        return partial(_model_of_recipe, name)
    return model_registry.get_model(name, also=builtin_names())


def _model_of_recipe(name: str, config: "JobConfig") -> nn.Module:
    """As `lockstep train` makes it; a plain `Config` will do, if its settings are such as the recipe has."""
    from lockstep.config.document import read_mapping
    from lockstep.config.draft import Draft
    from lockstep.config.resolved import dump
    from lockstep.recipes.registry import find

    recipe: Any = find(name, "get_model")
    if not hasattr(recipe, "model"):
        raise UserError(f"{name} is searched, not trained: it has no model")
    if not isinstance(config, recipe.config_class):
        config = Draft(read_mapping(dump(config), f"get_model({name!r})")).check(recipe.config_class)
    model: nn.Module = made_for(config, recipe).model(config)  # type: ignore[arg-type]
    return model
