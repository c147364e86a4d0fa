"""Names of the parts of a checkpoint: models, optimizers, loader …; and the digest of its trained state."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lockstep.engine.state_digest import digest, flatten_optimizer_state, named_tensors

BUFFERS = ".buffers"  # suffix after a model's name: its non-persistent buffers, which its state dict omits
KEPT = "kept."  # prefix of other objects that the run saves; not part of the digest
STATE = "state."  # prefix of other objects that the run saves as part of the digest
OPTIMIZER = "optimizer"  # prefix of the optimizers' names
AVERAGE = "average"  # prefix of the names of EMAs
COMPRESSION = "compression"  # error feedback of compressed gradients; not part of the digest
LOADER = "loader"  # position in the data; not part of the digest


def trained_state(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint that the digest covers, under the names that `Run.state` gives them.

    Args:
        values: a checkpoint's values by part, as in `Checkpoint.values`.
    """
    state: dict[str, Tensor] = {}
    for part, value in values.items():
        if part.startswith(OPTIMIZER):
            state |= flatten_optimizer_state(part, value["state"])
        elif part.startswith(STATE):
            state |= dict(named_tensors(value, part))
        elif part not in (LOADER, COMPRESSION) and not part.startswith(KEPT):
            prefix = part.removesuffix(BUFFERS)
            state |= {f"{prefix}/{name}": tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
    return state


def parts_changed_only_by_updates(parts: Iterable[str]) -> list[str]:
    """Select the parts that only `step.update()` changes: optimizer state and averages. See [Note: late copies]."""
    return [part for part in parts if part.startswith((OPTIMIZER, AVERAGE))]


def checkpoint_digest(values: Mapping[str, Any]) -> str:
    """Return the digest of a checkpoint's trained state: the one that the run printed at that step."""
    return digest(trained_state(values))
