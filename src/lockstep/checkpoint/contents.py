"""What the parts of a run's checkpoint are called, and its state as the run's digest sees it."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from lockstep.engine.digest import digest, flattened, tensors_in

BUFFERS = ".buffers"  # after a model's name: those of its buffers that its state dict leaves out
KEPT = "kept."  # before the name of what else the run keeps; not part of the digest
STATE = "state."  # before the name of what it keeps as part of the digest
OPTIMIZER = "optimizer"  # what optimizers' names begin with
AVERAGE = "average"  # what averages' names begin with
COMPRESSION = "compression"  # what compressed gradients left out, and the like; not part of the digest
LOADER = "loader"  # the position of a data stream; not part of the digest either


def state_in(values: Mapping[str, Any]) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names that `Run.state` gives them: equal state, equal digest."""
    state: dict[str, Tensor] = {}
    for part, value in values.items():
        if part.startswith(OPTIMIZER):
            state |= flattened(part, value["state"])
        elif part.startswith(STATE):
            state |= dict(tensors_in(value, part))
        elif part not in (LOADER, COMPRESSION) and not part.startswith(KEPT):
            prefix = part.removesuffix(BUFFERS)
            state |= {f"{prefix}/{name}": tensor for name, tensor in value.items() if isinstance(tensor, Tensor)}
    return state


def changed_by_updates_alone(parts: Iterable[str]) -> list[str]:
    """Optimizers' state and averages are nobody's business but theirs; weights and buffers anybody's."""
    return [part for part in parts if part.startswith((OPTIMIZER, AVERAGE))]


def digest_of(values: Mapping[str, Any]) -> str:
    return digest(state_in(values))
