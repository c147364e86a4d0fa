"""Names of the parts of a checkpoint: models, optimizers, loader …; and the digest of its trained state."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from lockstep.engine.state_digest import digest, flatten_optimizer_state, named_tensors

BUFFERS_SUFFIX = ".buffers"  # suffix after a model's name: its non-persistent buffers, which its state dict omits
KEPT_PREFIX = "kept."  # prefix of other objects that the run saves; not part of the digest
STATE_PREFIX = "state."  # prefix of other objects that the run saves as part of the digest
MODEL_PREFIX = "model"  # prefix of the models' names
OPTIMIZER_PREFIX = "optimizer"  # prefix of the optimizers' names
AVERAGE_PREFIX = "average"  # prefix of the names of EMAs
COMPRESSION_PART = "compression"  # error feedback of compressed gradients; not part of the digest
SCALER_PART = "loss_scaler"
LOADER_PART = "loader"  # position in the data; not part of the digest


def check_parts(values: Mapping[str, Any]) -> None:
    """Raise a ValueError unless the parts have the structure in which a run saves them, whatever their tensors are.

    The message is the end of a sentence about the manifest. The contents of registered state belong to the script.

    Args:
        values: a checkpoint's values by part, as in `Checkpoint.values`.
    """
    _require(LOADER_PART in values, "has no position in the data")
    for part, value in values.items():
        if part.startswith((KEPT_PREFIX, STATE_PREFIX)):
            continue
        _require(_is_named(value), f"has no names in {part}")
        if part.startswith(OPTIMIZER_PREFIX):
            _check_optimizer(part, value)
        elif part.startswith(AVERAGE_PREFIX) or part.endswith(BUFFERS_SUFFIX) or part == SCALER_PART:
            are_tensors = all(isinstance(tensor, Tensor) for tensor in value.values())
            _require(are_tensors, f"has something else than tensors in {part}")


def _check_optimizer(part: str, value: Mapping[str, Any]) -> None:
    kind, state, groups = value.get("kind"), value.get("state", {}), value.get("groups", [])
    _require(isinstance(kind, str) and isinstance(value.get("besides"), dict), f"does not say what {part} is")
    is_by_parameter = isinstance(state, dict) and all(isinstance(each, dict) for each in state.values())
    _require(is_by_parameter, f"has no state by parameter in {part}")
    _require(isinstance(groups, list) and all(map(_is_named, groups)), f"has no groups in {part}")
    for group in groups:
        owners = group.get("params")
        is_known = isinstance(owners, list) and all(isinstance(owner, str) and owner in state for owner in owners)
        _require(is_known, f"lacks the state of parameters in {part}")


def _is_named(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)


def trained_state(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint that the digest covers, under the names that `Run.state` gives them.

    Args:
        values: a checkpoint's values by part, as in `Checkpoint.values`.
    """
    state: dict[str, Tensor] = {}
    for part, value in values.items():
        if part.startswith(OPTIMIZER_PREFIX):
            state |= flatten_optimizer_state(part, value["state"])
        elif part.startswith(STATE_PREFIX):
            state |= dict(named_tensors(value, part))
        elif part not in (LOADER_PART, COMPRESSION_PART) and not part.startswith(KEPT_PREFIX):
            prefix = part.removesuffix(BUFFERS_SUFFIX)
            state |= {f"{prefix}/{name}": tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
    return state


def renamed(values: Mapping[str, Any], rename: Callable[[str], str]) -> dict[str, Any]:
    """Return a checkpoint's values with other names of the models' parameters and buffers.

    Args:
        values: a checkpoint's values by part, as in `Checkpoint.values`.
        rename: returns a tensor's new name in its model.
    """

    def rename_owner(owner: str) -> str:
        model, slash, name = owner.partition("/")
        return f"{model}/{rename(name)}" if slash else owner  # a parameter that no model has is a number

    result = dict(values)
    for part, value in values.items():
        if part.startswith((MODEL_PREFIX, AVERAGE_PREFIX)):
            result[part] = {rename(name): tensor for name, tensor in value.items()}
        elif part.startswith(OPTIMIZER_PREFIX):
            groups = [group | {"params": list(map(rename_owner, group["params"]))} for group in value["groups"]]
            state = {rename_owner(owner): state for owner, state in value["state"].items()}
            result[part] = {**value, "state": state, "groups": groups}
        elif part == COMPRESSION_PART:
            result[part] = {rename_owner(owner): state for owner, state in value.items()}
    return result


def parts_changed_only_by_updates(parts: Iterable[str]) -> list[str]:
    """Select the parts that only `step.update()` changes: optimizer state and averages. See [Note: late copies]."""
    return [part for part in parts if part.startswith((OPTIMIZER_PREFIX, AVERAGE_PREFIX))]


def checkpoint_digest(values: Mapping[str, Any]) -> str:
    """Return the digest of a checkpoint's trained state: the one that the run printed at that step."""
    return digest(trained_state(values))
