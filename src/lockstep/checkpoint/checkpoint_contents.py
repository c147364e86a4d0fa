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
LOADER_PART = "loader"  # position in the data; not part of the digest


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
