"""Models by name, so that a config can choose one: `@register_model("vae")`, then `get_model("vae")(config)`."""

import difflib
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from lockstep.errors import UserError

ModelFactory = Callable[..., nn.Module]
Factory = TypeVar("Factory", bound=ModelFactory)

_models: dict[str, ModelFactory] = {}


def register_model(name: str) -> Callable[[Factory], Factory]:
    """Register a module class, or a function that makes a module, under a name: use it as a decorator.

    A name can be registered once. The same definition may be registered again, as a notebook's cell does.
    """

    def register(model: Factory) -> Factory:
        if name in _models and _described(_models[name]) != _described(model):
            raise UserError(f"the name {name} is taken by {_described(_models[name])}: register this one under another")
        _models[name] = model
        return model

    return register


def is_registered(name: str) -> bool:
    return name in _models


def registered_model(name: str, *, also: Iterable[str] = ()) -> ModelFactory:
    """Return what was registered under this name; call it, usually with a config. `also`: names known elsewhere."""
    if name not in _models:
        known = sorted({*_models, *also})
        nearest = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known) or 'none'}"
        raise UserError(f"no model is registered as {name!r}; {hint}")
    return _models[name]


def _described(model: Any) -> str:
    name = getattr(model, "__qualname__", "<partial>")
    return repr(model) if name.endswith(">") else f"{model.__module__}.{name}"  # a lambda shares its name with others
