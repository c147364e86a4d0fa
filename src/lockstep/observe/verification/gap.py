"""By how much do two updates differ? From the values that rank 0 of each has kept."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

# Of a tensor's largest value. What fp32 sums differ by, with room; and what bf16 or TF32 can do to them.
ROUNDING = 1e-4
COARSE_ROUNDING = 2e-2

_SAME_DIRECTION = 0.9999
_ANOTHER_LENGTH = 0.05


class Gap(NamedTuple):
    """Between the values that were kept of one tensor, or of several."""

    largest: float  # absolute
    relative: float  # of the tensor's largest value; of several tensors, the largest of these

    def __str__(self) -> str:
        if self.largest == 0:
            return "in values that were not looked at"
        if not math.isfinite(self.largest):
            return "as one of them is not finite"
        return f"by up to {self.largest:.2g} ({self.relative:.2g} of the tensor's largest value)"


class Tilt(NamedTuple):
    """How one vector lies to another."""

    cosine: float
    scale: float  # as long as the other, along its direction

    @property
    def is_scaled_alone(self) -> bool:
        return abs(self.cosine) > _SAME_DIRECTION and abs(self.scale - 1) > _ANOTHER_LENGTH


def gap_in(phase: str, one: Path, many: Path, tensor: str | None = None) -> Gap | None:
    """Of one tensor, or the largest of all in the phase; None where there is nothing to compare."""
    gaps = [_gap(left, right) for left, right in _pairs(phase, one, many, tensor)]
    if not gaps:
        return None
    return Gap(max(gap.largest for gap in gaps), max(gap.relative for gap in gaps))


def tilt_in(phase: str, one: Path, many: Path) -> Tilt | None:
    """Of all tensors of the phase as one vector."""
    pairs = _pairs(phase, one, many, None)
    own = sum(float(left @ left) for left, _ in pairs)
    other = sum(float(right @ right) for _, right in pairs)
    product = sum(float(left @ right) for left, right in pairs)
    if not (math.isfinite(own) and math.isfinite(other)) or own == 0 or other == 0:
        return None
    return Tilt(product / math.sqrt(own * other), product / own)


def _pairs(phase: str, one: Path, many: Path, tensor: str | None) -> "list[tuple[np.ndarray[Any, Any], Any]]":
    """The values of tensors that both have, in the same shape."""
    from safetensors.numpy import load_file

    left, right = load_file(one), load_file(many)
    names = [name for name in left if name.startswith(f"{phase}/") and name in right]
    if tensor is not None:
        names = [name for name in names if name == f"{phase}/{tensor}"]
    return [
        (left[name].astype("float64"), right[name].astype("float64"))
        for name in names
        if left[name].shape == right[name].shape and left[name].size
    ]


def _gap(left: "np.ndarray[Any, Any]", right: "np.ndarray[Any, Any]") -> Gap:
    import numpy as np

    differs = (left != right) & ~(np.isnan(left) & np.isnan(right))
    if not differs.any():
        return Gap(0.0, 0.0)
    largest = float(abs(left[differs] - right[differs]).max())
    if not math.isfinite(largest):  # never to be taken for rounding
        return Gap(math.inf, math.inf)
    values = np.concatenate([left, right])
    return Gap(largest, largest / float(abs(values[np.isfinite(values)]).max()))
