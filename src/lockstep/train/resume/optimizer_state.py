"""Optimizer state by parameter name, as checkpoints hold it: it does not depend on the parameters' order."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.engine.state_digest import parameters_by_name
from lockstep.errors import UserError
from lockstep.train.strategies.parallel_strategy import ParallelStrategy

logger = logging.getLogger("lockstep")


def optimizer_value(
    optimizer: Optimizer, models: Mapping[str, nn.Module], strategy: ParallelStrategy
) -> dict[str, Any]:
    """Return the state of each parameter, any other state, and each group's settings with its parameters' names."""
    here = strategy.optimizer_here(optimizer)
    owners = parameters_by_name(optimizer, models)
    names = {id(parameter): owner for owner, parameter in owners.items()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    return {
        "kind": type(optimizer).__name__,
        "state": {
            owner: {key: strategy.to_save(p, value) for key, value in here.state.get(strategy.holder(p), {}).items()}
            for owner, p in owners.items()
        },
        "besides": {key: value for key, value in here.state.items() if not isinstance(key, Tensor)},
        "groups": groups,
    }


def whole_state(
    optimizer: Optimizer, models: Mapping[str, nn.Module], strategy: ParallelStrategy
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the state of each parameter in turn, unsharded. All ranks must call it together."""
    here = strategy.optimizer_here(optimizer)
    for owner, p in parameters_by_name(optimizer, models).items():
        state = here.state.get(strategy.holder(p), {})
        yield owner, {key: strategy.whole(p, value) for key, value in state.items()}


def load_optimizer(
    name: str,
    optimizer: Optimizer,
    models: Mapping[str, nn.Module],
    value: Mapping[str, Any],
    strategy: ParallelStrategy,
    *,
    keep_settings: bool,
) -> None:
    """Load saved state. `Optimizer.load_state_dict` casts state to its parameter's type, which would change bits.

    `keep_settings`: the groups keep their current settings, such as the learning rate.
    """
    owners = parameters_by_name(optimizer, models)
    groups = optimizer_value(optimizer, models, strategy)["groups"]
    if [group["params"] for group in groups] != [group["params"] for group in value["groups"]]:
        raise UserError(f"{name} was saved with other parameters or groups: use the same, in the same order")
    if value["kind"] != type(optimizer).__name__:  # only with resume="force"
        logger.warning("%s was a %s: its saved state does not fit a %s", name, value["kind"], type(optimizer).__name__)
        return
    here = strategy.optimizer_here(optimizer)
    first = optimizer.param_groups[0]
    # An optimizer of the script's own, or a scheduler, may keep anything in the groups, such as a list that grows.
    own_settings = optimizer.defaults.keys() if type(optimizer).__module__.startswith("torch.optim.") else ()
    for key, part in value["besides"].items():
        here.state[key] = _placed(key, part, first["params"][0], first)
    for group, saved in zip(optimizer.param_groups, value["groups"], strict=True):
        settings = {} if keep_settings else {key: setting for key, setting in saved.items() if key != "params"}
        for key, setting in settings.items():
            if key in own_settings and key in group and not _is_alike(group[key], setting):
                ours, saved_as = repr(group[key])[:40], repr(setting)[:40]
                raise UserError(f"{name} was saved with {key}={saved_as}: expected a value like {ours}")
            if isinstance(group.get(key), Tensor):
                group[key].copy_(setting)  # in place: groups may share it
            else:
                group[key] = setting
        for owner in saved["params"]:
            parameter, holder = owners[owner], strategy.holder(owners[owner])
            state = {
                key: _placed(key, strategy.to_load(parameter, key, part), holder, group)
                for key, part in value["state"][owner].items()
            }
            if state:
                here.state[holder] = state
            else:
                here.state.pop(holder, None)


def _is_alike(ours: Any, saved: Any) -> bool:
    """Can a saved setting take the place of ours? Numbers, also in tensors, for numbers; flags, or None, for flags."""
    if isinstance(ours, bool | None):
        return isinstance(saved, bool | None) or ours is None
    if isinstance(ours, list | tuple):
        return isinstance(saved, list | tuple) and len(ours) == len(saved) and all(map(_is_alike, ours, saved))
    kinds = next((kinds for kinds in (int | float | Tensor, str) if isinstance(ours, kinds)), object)
    return isinstance(saved, kinds) and not (kinds is not object and isinstance(saved, bool))


def _placed(key: str, value: Any, parameter: Parameter, group: Mapping[str, Any]) -> Any:
    """Put tensors on their parameter's device; but, as torch does, step counts where the host can read them."""
    if isinstance(value, Mapping):
        return {inner: _placed(inner, element, parameter, group) for inner, element in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(key, element, parameter, group) for element in value)
    if not isinstance(value, Tensor):
        return value
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value.clone()
    # In the parameter's memory layout: fused optimizers treat both as flat arrays.
    like = parameter if value.shape == parameter.shape else value
    return torch.empty_like(like, dtype=value.dtype, device=parameter.device, requires_grad=False).copy_(value)
