"""Tensors that were saved in pieces, by the ranks that had them, as whole ones again."""

from collections.abc import Mapping
from itertools import combinations
from math import prod

import torch
from torch import Tensor

from lockstep.checkpoint.manifest import Piece, ShardedTensor


def assemble(sharded: Mapping[str, ShardedTensor], files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each tensor from its pieces, which must cover it exactly; else it is a ValueError that names it."""
    return {name: _whole(name, tensor, files) for name, tensor in sharded.items()}


def _whole(name: str, tensor: ShardedTensor, files: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    pieces = [(piece, _content(name, piece, files)) for piece in tensor.pieces]
    boxes = [_box(piece, content) for piece, content in pieces]
    # As many elements, all inside, none twice: then nothing is missing. Looked at before the whole is made, so that
    # its memory is bounded by what was read.
    fits = sum(content.numel() for _, content in pieces) == prod(tensor.shape) and pieces
    inside = all(side.stop <= size for box in boxes for side, size in zip(box, tensor.shape, strict=True))
    if not fits or not inside or any(_overlap(a, b) for a, b in combinations(boxes, 2)):
        raise ValueError(f"the pieces of {name} do not make a tensor of {tuple(tensor.shape)}")
    whole = torch.empty(tensor.shape, dtype=pieces[0][1].dtype)
    for box, (_, content) in zip(boxes, pieces, strict=True):
        if content.dtype != whole.dtype:
            raise ValueError(f"the pieces of {name} are of different types")
        whole[box] = content
    return whole


def _content(name: str, piece: Piece, files: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    content = files.get(piece.file, {}).get(name)
    if content is None or content.dim() != len(piece.offsets):
        raise ValueError(f"{piece.file} lacks its piece of {name}")
    return content


def _box(piece: Piece, content: Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(piece.offsets, content.shape, strict=True))


def _overlap(one: tuple[slice, ...], other: tuple[slice, ...]) -> bool:
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in zip(one, other, strict=True))
