"""An optimizer's state as a value: by its parameters' names, so that it does not depend on their order."""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.engine.digest import owners_in
from lockstep.errors import UserError
from lockstep.train.strategies.strategy import Strategy

logger = logging.getLogger("lockstep")


def optimizer_value(optimizer: Optimizer, models: Mapping[str, nn.Module], strategy: Strategy) -> dict[str, Any]:
    """The state for each parameter, what it keeps besides, and each group's settings with its parameters' names."""
    here = strategy.optimizer_here(optimizer)
    owners = owners_in(optimizer, models)
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
    optimizer: Optimizer, models: Mapping[str, nn.Module], strategy: Strategy
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The state for each parameter, one after another, as if one rank had everything. All ranks ask together."""
    here = strategy.optimizer_here(optimizer)
    for owner, p in owners_in(optimizer, models).items():
        state = here.state.get(strategy.holder(p), {})
        yield owner, {key: strategy.whole(p, value) for key, value in state.items()}


def load_optimizer(
    name: str,
    optimizer: Optimizer,
    models: Mapping[str, nn.Module],
    value: Mapping[str, Any],
    strategy: Strategy,
    *,
    keep_settings: bool,
) -> None:
    """Not by its own `load_state_dict`, which gives the state its parameter's type: that would change bits."""
    owners = owners_in(optimizer, models)
    groups = optimizer_value(optimizer, models, strategy)["groups"]
    if [group["params"] for group in groups] != [group["params"] for group in value["groups"]]:
        raise UserError(f"{name} was saved with other parameters, or with others in its groups")
    if value["kind"] != type(optimizer).__name__:  # whoever comes here has accepted that
        logger.warning("%s was a %s: its state is of no use to a %s", name, value["kind"], type(optimizer).__name__)
        return
    here = strategy.optimizer_here(optimizer)
    first = optimizer.param_groups[0]
    for key, part in value["besides"].items():
        here.state[key] = _placed(key, part, first["params"][0], first)
    for group, saved in zip(optimizer.param_groups, value["groups"], strict=True):
        settings = {} if keep_settings else {key: setting for key, setting in saved.items() if key != "params"}
        for key, setting in settings.items():
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


def _placed(key: str, value: Any, parameter: Parameter, group: Mapping[str, Any]) -> Any:
    """Tensors beside their parameter; but a count of steps, as torch has it, where the host can read it at once."""
    if isinstance(value, Mapping):
        return {inner: _placed(inner, element, parameter, group) for inner, element in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_placed(key, element, parameter, group) for element in value)
    if not isinstance(value, Tensor):
        return value
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value.clone()
    # In memory as the parameter is: fused optimizers take both for one long row of numbers.
    like = parameter if value.shape == parameter.shape else value
    return torch.empty_like(like, dtype=value.dtype, device=parameter.device, requires_grad=False).copy_(value)
