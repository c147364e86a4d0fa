"""Many tensors as few: one flat tensor of each type, so that they are fetched from the device in one go."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def pack(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Tensors of any shapes and types, as few tensors and lists of whole numbers."""
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    types = list(by_type)
    return {
        "shapes": [list(tensor.shape) for tensor in tensors],
        "types": [types.index(tensor.dtype) for tensor in tensors],
        "flat": [torch.cat([tensor.detach().reshape(-1) for tensor in alike]) for alike in by_type.values()],
    }


def unpack(packed: dict[str, Any]) -> list[Tensor]:
    """What was packed, in its order."""
    starts = [0] * len(packed["flat"])
    tensors = []
    for shape, type_ in zip(packed["shapes"], packed["types"], strict=True):
        start, size = starts[type_], math.prod(shape)
        tensors.append(packed["flat"][type_][start : start + size].reshape(shape))
        starts[type_] += size
    return tensors
