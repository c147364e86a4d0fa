"""The global norm of gradients, and clipping by it."""

from collections.abc import Iterable

import torch
from torch import Tensor

from lockstep.engine.scaling import scale_gradients
from lockstep.errors import UserError

# The sum of squares is taken over blocks of this many elements, counted from each tensor's first, and then over the
# blocks' sums in order: a rank that holds only some blocks can compute theirs and come to the same bits.
BLOCK = 1024


def block_squares(tensor: Tensor) -> Tensor:
    """The sum of squares of each block of a tensor, in fp64."""
    if tensor.layout != torch.strided:
        raise UserError("clip_norm cannot clip sparse gradients: use Embedding(…, sparse=False), or leave it out")
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    blocks = [flat[:whole].view(-1, BLOCK)] if whole else []
    if whole < flat.numel():
        blocks.append(flat[whole:].view(1, -1))
    norms = [torch.linalg.vector_norm(block, dim=1, dtype=_accumulate_in(flat)) for block in blocks]
    return torch.cat(norms).double().square() if norms else flat.new_zeros(0, dtype=torch.float64)


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all the tensors together, as an fp64 tensor: nothing waits for the device."""
    squares = [block_squares(tensor) for tensor in tensors]
    return norm_of_blocks(torch.cat(squares)) if squares else torch.zeros((), dtype=torch.float64)


def norm_of_blocks(squares: Tensor) -> Tensor:
    """From the squares of all blocks of all tensors, in their order."""
    return squares.sum().sqrt()


def scale_to_norm(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale gradients that have this norm, in place, so that it is at most `max_norm`."""
    scale_gradients(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def _accumulate_in(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
