"""Compare the values that rank 0 of each of two jobs has recorded of an update: by norm, direction and element."""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    Pair = tuple[Array, Array]  # a tensor of one job and of the other

# Vectors are scaled if this explains at least 90 % of their difference, and it is more than rounding.
_ACROSS, _OTHER_LENGTH = 0.3, 1e-4


class UpdateValues:
    """The tensors that both jobs have recorded of an update, by phase and name."""

    def __init__(self, one: Path, many: Path) -> None:
        """Read the file of each job."""
        from safetensors.numpy import load_file

        self._one, self._many = load_file(one), load_file(many)

    def either(self, phase: str) -> "Iterator[tuple[str, tuple[Array | None, Array | None]]]":
        """Yield what each job has of each tensor of a phase."""
        for key in dict.fromkeys([*self._one, *self._many]):
            if key.startswith(f"{phase}/"):
                yield key.removeprefix(f"{phase}/"), (self._one.get(key), self._many.get(key))

    def pairs(self, phase: str) -> "dict[str, Pair]":
        """Return the tensors of a phase that both jobs have in the same shape."""
        return {
            name: (left, right)
            for name, (left, right) in self.either(phase)
            if left is not None and right is not None and left.shape == right.shape
        }

    def has_same_tensors(self, phase: str) -> bool:
        """Have both jobs recorded the same tensors of a phase?"""
        return all(left is not None and right is not None for _, (left, right) in self.either(phase))


class ValueGap(NamedTuple):
    """The largest difference between the values of a tensor."""

    largest: float  # absolute
    relative: float  # to the tensor's largest value

    def __str__(self) -> str:
        if self.largest == 0:
            return "in values that were not recorded"
        if not math.isfinite(self.largest):
            return "and one of them is not finite"
        return f"by up to {self.largest:.2g} ({self.relative:.2g} of the tensor's largest value)"


class Alignment(NamedTuple):
    """How a vector lies to another: what it has of it, and what is at right angles to it."""

    scale: float  # the length along the other's direction, relative to the other
    across: float  # the length at right angles to it, relative to the other

    @property
    def is_only_scaled(self) -> bool:
        """Do they have the same direction but different lengths?"""
        off = abs(self.scale - 1)
        return off > _OTHER_LENGTH and self.across < _ACROSS * off


def largest_gap(pair: "Pair") -> ValueGap:
    """Return the largest difference between the values of a tensor."""
    import numpy as np

    left, right = (each.astype("float64").ravel() for each in pair)
    differs = _differs(left, right)
    if not differs.any():
        return ValueGap(0.0, 0.0)
    largest = float(abs(left[differs] - right[differs]).max())
    if not math.isfinite(largest):
        return ValueGap(math.inf, math.inf)
    values = np.concatenate([left, right])
    return ValueGap(largest, largest / float(abs(values[np.isfinite(values)]).max()))


def alignment_of(pairs: "Iterable[Pair]") -> Alignment | None:
    """Compare all tensors of the second job, as one vector, with those of the first; None if not finite, or zero."""
    own = other = product = 0.0
    for pair in pairs:
        left, right = (each.astype("float64").ravel() for each in pair)
        own, other, product = own + float(left @ left), other + float(right @ right), product + float(left @ right)
    if not (math.isfinite(own) and math.isfinite(other)) or own == 0 or other == 0:
        return None
    scale = product / own
    return Alignment(scale, math.sqrt(max(other / own - scale * scale, 0.0)))


def norm_of(pairs: "Iterable[Pair]") -> float:
    """Return the norm of the finite values of all tensors, of the job in which it is larger."""
    import numpy as np

    squares = [[float(np.sum(each[np.isfinite(each)].astype("float64") ** 2)) for each in pair] for pair in pairs]
    return math.sqrt(max(map(sum, zip(*squares, strict=True)), default=0.0))


def distance_of(pair: "Pair") -> float:
    """Return the norm of the difference; values that are not finite, but the same, do not differ."""
    import numpy as np

    left, right = (each.astype("float64") for each in pair)
    differs = _differs(left, right)
    return float(np.linalg.norm(left[differs] - right[differs]))


def relative_distance(pairs: "Iterable[Pair]") -> float:
    """Return the norm of the difference of all tensors together, relative to their norm."""
    pairs = list(pairs)
    return math.hypot(*map(distance_of, pairs)) / (norm_of(pairs) or 1.0)


def _differs(left: "Array", right: "Array") -> "Array":
    import numpy as np

    differs: Array = (left != right) & ~(np.isnan(left) & np.isnan(right))
    return differs
