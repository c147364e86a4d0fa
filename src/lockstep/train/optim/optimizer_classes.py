"""The class of the optimizer that a config names, and whether its constructor takes the config's arguments."""

import inspect
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from lockstep.config.named_object import import_named
from lockstep.config.optimizer_settings import OWN_SETTINGS
from lockstep.errors import UserError

if TYPE_CHECKING:  # scripts need no pydantic
    from lockstep.config.train_schema import OptimConfig

_NUM_SHOWN = 8  # arguments, where none is similar
_CLOSURE = "evaluates the loss several times in a step, which `Step` does not support: use another optimizer"
_TOP_LEVEL = {"lr": "optim.lr", "weight_decay": "optim.weight_decay"}  # arguments that are settings of every optimizer


def find_optimizer(name: str) -> type[Optimizer]:
    """Return a class of `torch.optim` by its name, in any case, or the class that `package.module:Class` names."""
    if ":" in name:
        kind = import_named(name)
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise UserError(f"{name} is not a subclass of torch.optim.Optimizer")
    else:
        known = _torch_optimizers()
        if name.lower() not in known:
            near = get_close_matches(name.lower(), known, n=1)
            spelt = near[0] if near and near[0] in OWN_SETTINGS else known[near[0]].__name__ if near else ""
            hint = f"; did you mean {spelt}?" if near else f": expected one of {', '.join(usable_optimizers())}"
            raise UserError(f"torch.optim has no optimizer {name!r}{hint}")
        kind = known[name.lower()]
    require_no_closure(kind)
    if issubclass(kind, torch.optim.SparseAdam):
        raise UserError(f"{kind.__name__} takes sparse gradients only, and a recipe's are dense: use adam or adamw")
    return kind


def usable_optimizers() -> list[str]:
    """Return the names of the classes of `torch.optim` that a config may name."""
    kinds = _torch_optimizers().values()
    usable = [kind for kind in kinds if not (_needs_closure(kind) or issubclass(kind, torch.optim.SparseAdam))]
    return sorted((kind.__name__ for kind in usable), key=str.lower)


def require_no_closure(kind: type[Optimizer]) -> None:
    """Refuse an optimizer that calls the model itself."""
    if _needs_closure(kind):
        raise UserError(f"{kind.__name__} {_CLOSURE}")


def optimizer_problems(optim: "OptimConfig") -> Iterator[tuple[str, str]]:
    """Yield each key of the `optim:` section that the optimizer cannot be made with, and what is wrong with it."""
    try:
        kind = find_optimizer(optim.name)
    except UserError as error:
        yield "name", str(error)
        return
    known = _Arguments(kind)
    if not known.takes("lr"):
        yield "name", f"{kind.__name__} has no argument lr: use an optimizer whose learning rate can be set"
    if optim.weight_decay and not known.takes("weight_decay"):
        yield "weight_decay", f"{kind.__name__} has no weight decay: set it to 0"
    for index, group in enumerate(optim.groups):
        if group.weight_decay is not None and not known.takes("weight_decay"):
            yield f"groups[{index}].weight_decay", f"{kind.__name__} has no weight decay: omit it"
    given = optimizer_arguments(optim)
    own = {name: f"optim.{name}" for name in OWN_SETTINGS.get(optim.name, ())}
    for name in given:
        if place := {**_TOP_LEVEL, **own}.get(name):
            yield f"arguments.{name}", f"write {place} instead"
        elif name == "params" or not known.takes(name):
            yield f"arguments.{name}", known.describe_unknown(name)
    if missing := [name for name in known.required if name not in given and name not in _TOP_LEVEL]:
        yield "arguments", f"{kind.__name__} also needs {', '.join(missing)}"


def optimizer_arguments(optim: "OptimConfig") -> dict[str, Any]:
    """Return the section's `arguments`, as plain values."""
    arguments: dict[str, Any] = optim.arguments.model_dump()
    return arguments


def takes_argument(kind: type[Optimizer], name: str) -> bool:
    """Return whether the optimizer's constructor has this argument."""
    return _Arguments(kind).takes(name)


class _Arguments:
    """The arguments of an optimizer's constructor."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self._kind = kind
        parameters = list(inspect.signature(kind).parameters.values())[1:]  # the first takes the parameters to train
        self._takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]

    @property
    def required(self) -> list[str]:
        return [each.name for each in self._named if each.default is each.empty]

    def takes(self, name: str) -> bool:
        return self._takes_any or any(each.name == name for each in self._named)

    def describe_unknown(self, name: str) -> str:
        names = [each.name for each in self._named if each.name not in _TOP_LEVEL]
        near = get_close_matches(name, names, n=1)
        shown = ", ".join(names[:_NUM_SHOWN]) + ", …" * (len(names) > _NUM_SHOWN)
        hint = f"; did you mean {near[0]}?" if near else f"; it has {shown}" if names else ""
        return f"{self._kind.__name__} has no argument {name}{hint}"


def _needs_closure(kind: type[Optimizer]) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _torch_optimizers() -> dict[str, type[Optimizer]]:
    """Return the classes of torch.optim by their names in lower case."""
    classes = (each for each in vars(torch.optim).values() if isinstance(each, type) and issubclass(each, Optimizer))
    return {each.__name__.lower(): each for each in classes if each is not Optimizer}
