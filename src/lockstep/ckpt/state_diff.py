"""`lockstep ckpt diff`: which tensors of two states differ, and by how much. Equal means equal bits."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

_CHUNK = 2**22  # elements at once: they are compared in float64


class TensorDifference(NamedTuple):
    """How one tensor differs. The numbers are set if both sides have the same shape and dtype."""

    name: str
    left: str | None  # its dtype and shape; None: it is missing
    right: str | None
    num_elements: int = 0
    num_different: int = 0  # in their bits
    num_nonfinite: int = 0  # of the different ones, where either side is NaN or infinite; not included below
    max_abs: float = 0.0
    relative: float = 0.0  # norm of the difference divided by the norm of the left side

    def __str__(self) -> str:
        if self.left is None or self.right is None:
            return f"{self.name}: {self.right or self.left}, only in the {'second' if self.left is None else 'first'}"
        if self.left != self.right:
            return f"{self.name}: {self.left} in the first, {self.right} in the second"
        differs = f"{self.num_different:,} of {self.num_elements:,} differ"
        nonfinite = f", {self.num_nonfinite:,} in NaN or infinity" if self.num_nonfinite else ""
        return f"{self.name}: {differs}, by {self.max_abs:.3g} at most, {self.relative:.2g} of the norm{nonfinite}"

    def as_json(self) -> dict[str, Any]:
        """Return it as `--json` prints it."""
        return self._asdict()


def compare_states(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> list[TensorDifference]:
    """List the tensors that differ: in the order of the left state, then those that only the right one has."""
    differences = []
    for name in dict.fromkeys([*left, *right]):
        one, other = left.get(name), right.get(name)
        if one is None or other is None or _describe(one) != _describe(other):
            left_type, right_type = (None if tensor is None else _describe(tensor) for tensor in (one, other))
            differences.append(TensorDifference(name, left_type, right_type))
        elif (difference := _measure(name, one, other)).num_different:
            differences.append(difference)
    return differences


def _measure(name: str, left: Tensor, right: Tensor) -> TensorDifference:
    num_different = num_nonfinite = 0
    largest = square = left_square = 0.0
    for one, other in zip(torch.split(_flat(left), _CHUNK), torch.split(_flat(right), _CHUNK), strict=True):
        differs = (_bits(one) != _bits(other)).any(dim=1)
        a, b = _wide(one), _wide(other)
        finite = a.isfinite() & b.isfinite()
        gap = (a - b)[finite].abs()
        num_different += int(differs.sum())
        num_nonfinite += int((differs & ~finite).sum())
        largest = max(largest, float(gap.max()) if gap.numel() else 0.0)
        square += float(gap.square().sum())
        left_square += float(a[finite].abs().square().sum())
    relative = math.sqrt(square / left_square) if left_square else math.inf if square else 0.0
    return TensorDifference(
        name,
        _describe(left),
        _describe(right),
        num_elements=left.numel(),
        num_different=num_different,
        num_nonfinite=num_nonfinite,
        max_abs=largest,
        relative=relative,
    )


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1)


def _bits(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _wide(flat: Tensor) -> Tensor:
    return flat.to(torch.complex128 if flat.is_complex() else torch.float64)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
