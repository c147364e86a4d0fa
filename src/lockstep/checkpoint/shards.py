"""Tensors that were saved in pieces, by the ranks that had them, as whole ones again."""

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor

from lockstep.checkpoint.manifest import Piece, ShardedTensor, one_line


def assemble(sharded: Mapping[str, ShardedTensor], files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Each tensor from its pieces, which must cover it exactly; else it is a ValueError that names it."""
    return {name: _whole(name, tensor, files) for name, tensor in sharded.items()}


def _whole(name: str, tensor: ShardedTensor, files: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    pieces = [(piece, _content(name, piece, files)) for piece in tensor.pieces]
    boxes = [_box(piece, content) for piece, content in pieces]
    problem = f"the pieces of {one_line(name)} do not make a tensor of {tuple(tensor.shape)}"
    # As many elements, all inside, none twice: then nothing is missing. The first two are looked at before the whole
    # is made, so that its memory is bounded by what was read.
    fits = sum(content.numel() for _, content in pieces) == prod(tensor.shape) and pieces
    # Pieces with a single offset are stretches of the flattened tensor.
    is_flat = all(len(piece.offsets) == 1 for piece, _ in pieces)
    shape = (prod(tensor.shape),) if is_flat else tensor.shape
    inside = all(len(box) == len(shape) for box in boxes) and all(
        side.stop <= size for box in boxes for side, size in zip(box, shape, strict=True)
    )
    if not fits or not inside:
        raise ValueError(problem)
    whole = torch.empty(shape, dtype=pieces[0][1].dtype)
    is_filled = torch.zeros(shape, dtype=torch.bool)
    for box, (_, content) in zip(boxes, pieces, strict=True):
        if content.dtype != whole.dtype:
            raise ValueError(f"the pieces of {one_line(name)} are of different types")
        if is_filled[box].any():
            raise ValueError(problem)
        whole[box] = content
        is_filled[box] = True
    return whole.view(tensor.shape)


def _content(name: str, piece: Piece, files: Mapping[str, Mapping[str, Tensor]]) -> Tensor:
    content = files.get(piece.file, {}).get(name)
    if content is None or content.dim() != len(piece.offsets):
        raise ValueError(f"{piece.file} lacks its piece of {one_line(name)}")
    return content


def _box(piece: Piece, content: Tensor) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(piece.offsets, content.shape, strict=True))
