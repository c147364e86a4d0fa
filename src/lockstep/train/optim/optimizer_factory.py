"""Optimizers from a config: learning rates scaled by the batch, and parameter groups by name."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.config.optimizer_settings import OWN_SETTINGS
from lockstep.engine.compiled_models import named_parameters
from lockstep.errors import UserError
from lockstep.train.optim.optimizer_classes import (
    find_optimizer,
    optimizer_arguments,
    optimizer_problems,
    takes_argument,
)

if TYPE_CHECKING:  # scripts need no pydantic
    from lockstep.config.train_schema import OptimConfig

Groups = list[dict[str, Any]]
Scaling = Literal["none", "linear", "sqrt"]

_SCALINGS: dict[str, Callable[[float], float]] = {"linear": lambda ratio: ratio, "sqrt": sqrt}


class GroupRule(TypedDict):
    """Settings for the parameters whose names match a pattern, as file names match `*.txt`."""

    match: str
    lr_factor: NotRequired[float]
    weight_decay: NotRequired[float | None]  # the optimizer's if None


def scaled_lr(lr: float, global_batch: int, base_batch: int | None, rule: Scaling = "linear") -> float:
    """Scale a learning rate that was tuned at `base_batch` to another batch.

    Args:
        lr: the learning rate at `base_batch`.
        global_batch: the samples of one update now.
        base_batch: the samples of one update that `lr` was tuned at.
        rule: "linear" multiplies by the ratio of the batches, "sqrt" by its square root, "none" by nothing.
    """
    if rule == "none":
        return lr
    if rule not in _SCALINGS:
        raise UserError(f"learning-rate scaling: expected one of none, {', '.join(_SCALINGS)}, got {rule!r}")
    if base_batch is None or base_batch < 1:
        raise UserError(
            f"learning-rate scaling {rule} needs base_batch, the batch that lr={lr} was tuned at; got {base_batch}"
        )
    return lr * _SCALINGS[rule](global_batch / base_batch)  # the ratio first: with equal batches it is exactly 1


def parameter_groups(model: nn.Module, rules: Sequence[GroupRule], *, lr: float) -> Groups:
    """Sort a model's trainable parameters into groups for a torch optimizer, by the first rule that matches.

        parameter_groups(model, [{"match": "*.bias", "lr_factor": 0.1, "weight_decay": 0.0}], lr=3e-4)

    Args:
        model: whose parameters.
        rules: `match`, a pattern of parameter names, with `lr_factor`, `weight_decay` or both.
        lr: the learning rate of parameters that no rule matches.

    Groups come in the order of the rules, then the rest. Tied weights come once, and may be matched by any name.
    """
    for place, rule in enumerate(rules, 1):
        _check(rule, f"parameter groups: rule {place}")
    names: dict[Parameter, list[str]] = {}
    for name, parameter in named_parameters(model, remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    if not names:
        raise UserError("the model has no trainable parameter: set requires_grad=True on those to train")
    chosen: list[list[Parameter]] = [[] for _ in rules]
    rest: list[Parameter] = []
    for parameter, own in names.items():
        first = next((group for rule, group in zip(rules, chosen, strict=True) if _matches(rule, own)), rest)
        first.append(parameter)
    for rule, parameters in zip(rules, chosen, strict=True):
        if not parameters:
            raise UserError(_why_empty(rule, model))
    groups = [_group(rule, parameters, lr) for rule, parameters in zip(rules, chosen, strict=True)]
    return [*groups, {"params": rest, "lr": lr}] if rest else groups


def build_optimizer(model: nn.Module, optim: "OptimConfig", global_batch: int) -> Optimizer:
    """Return the optimizer of the config's `optim:` section."""
    lr = scaled_lr(optim.lr, global_batch, optim.base_batch, optim.lr_scaling)
    rules = [
        GroupRule(match=group.match, lr_factor=group.lr_factor, weight_decay=group.weight_decay)
        for group in optim.groups
    ]
    for key, problem in optimizer_problems(optim):
        raise UserError(f"optim.{key}: {problem}")
    kind = find_optimizer(optim.name)
    arguments = {name: getattr(optim, name) for name in OWN_SETTINGS.get(optim.name, ())} | optimizer_arguments(optim)
    if takes_argument(kind, "weight_decay"):
        arguments["weight_decay"] = optim.weight_decay
    groups = parameter_groups(model, rules, lr=lr)
    make: Callable[..., Optimizer] = kind
    try:
        return make(groups, lr=lr, **arguments)
    except (TypeError, ValueError) as error:  # of a value, which only the optimizer itself can check
        raise UserError(f"optim: {kind.__name__}: {' '.join(str(error).split())}") from error


def _matches(rule: GroupRule, names: Sequence[str]) -> bool:
    return any(fnmatchcase(name, rule["match"]) for name in names)


def _group(rule: GroupRule, parameters: list[Parameter], lr: float) -> dict[str, Any]:
    group = {"params": parameters, "lr": lr * rule.get("lr_factor", 1.0)}
    weight_decay = rule.get("weight_decay")
    return group if weight_decay is None else {**group, "weight_decay": weight_decay}


def _check(rule: Mapping[str, Any], place: str) -> None:
    """Check a rule. Torch ignores unknown keys of a group, so a misspelt one would have no effect."""
    known = GroupRule.__annotations__
    for key in rule:
        if key not in known:
            raise UserError(f"{place}: expected the keys {', '.join(known)}, got {key!r}")
    if not isinstance(rule.get("match"), str):
        raise UserError(f"{place}: needs match=, a pattern of parameter names, as in '*.bias'")
    for key in ("lr_factor", "weight_decay"):
        value = rule.get(key)
        if value is not None and not 0 <= value < float("inf"):
            raise UserError(f"{place}: {key}={value}: expected a number of at least 0")


def _why_empty(rule: GroupRule, model: nn.Module) -> str:
    trainable = {name: p.requires_grad for name, p in named_parameters(model, remove_duplicate=False)}
    matched = [name for name in trainable if _matches(rule, [name])]
    subject = f"parameter groups: {rule['match']!r}"
    taken = next((name for name in matched if trainable[name]), None)
    if taken is not None:
        return f"{subject} has nothing left to match: earlier rules take {taken}; put this rule before them"
    if matched:
        return f"{subject} matches only frozen parameters, such as {matched[0]}: remove the rule"
    near = get_close_matches(rule["match"], [name for name in trainable if trainable[name]], n=1, cutoff=0.0)
    return f"{subject} matches no trainable parameter; the nearest is {near[0]}"
