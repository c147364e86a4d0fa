"""Arithmetic on gradients: scaling, the global norm, clipping, and the check for infinities and NaNs.

All of it has the same bits however the gradients are split: tensor by tensor, in a flat buffer, or over ranks.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from lockstep.engine.torch_internals import foreach_all_finite, multiply_all_, stored_values
from lockstep.errors import UserError

# The sum of squares is taken over blocks of this many elements, counted from each tensor's first, and then over the
# blocks' sums in order: a rank that holds only some blocks can compute theirs, with the same bits.
BLOCK = 1024


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to add up or multiply numbers of this dtype in: at least single precision."""
    return torch.promote_types(dtype, torch.float32)


def scale_gradients(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply gradients by one number, in place.

    Torch multiplies in a different precision depending on whether it is given a Python number, a tensor, a list, or a
    zero-dimensional tensor. So the scale is always a tensor, in the precision to compute in.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        groups.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for (dtype, device), group in groups.items():
        compute_dtype = accumulation_dtype(dtype)
        is_double = compute_dtype in (torch.float64, torch.complex128)
        # Gradients may be in host memory while the scale is on a GPU.
        factor = scale.to(device, torch.float64 if is_double else torch.float32)
        if compute_dtype == dtype:
            multiply_all_(group, factor)
        else:
            for gradient in group:
                gradient.copy_(gradient.to(compute_dtype).mul_(factor))


def block_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares of each block of a tensor, in fp64."""
    if tensor.layout != torch.strided:
        raise UserError("clip_norm cannot clip sparse gradients: use Embedding(…, sparse=False), or omit clip_norm")
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    blocks = [flat[:whole].view(-1, BLOCK)] if whole else []
    if whole < flat.numel():
        blocks.append(flat[whole:].view(1, -1))
    norms = [torch.linalg.vector_norm(block, dim=1, dtype=accumulation_dtype(flat.dtype)) for block in blocks]
    return torch.cat(norms).double().square() if norms else flat.new_zeros(0, dtype=torch.float64)


def norm_of_blocks(squares: Tensor) -> Tensor:
    """Return the 2-norm, given the squares of all blocks of all tensors, in order."""
    return squares.sum().sqrt()


def global_norm(tensors: Iterable[Tensor]) -> Tensor:
    """Return the 2-norm of all the tensors together, as an fp64 tensor. Does not wait for the device."""
    squares = [block_squares(tensor) for tensor in tensors]
    return norm_of_blocks(torch.cat(squares)) if squares else torch.zeros((), dtype=torch.float64)


def scale_to_norm(gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Clip gradients whose global norm is `norm`, in place, so that it is at most `max_norm`."""
    scale_gradients(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether no tensor has an infinity or a NaN. Waits for the device.

    Called in every step, so each tensor is read once and the answer is one number for each dtype and device.
    """
    groups: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.requires_grad or tensor.is_sparse or tensor.is_complex():
            tensor = _real_dense(tensor.detach())
        groups.setdefault((tensor.dtype, tensor.get_device()), []).append(tensor)
    return all(foreach_all_finite(group) for group in groups.values())


def _real_dense(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        tensor = stored_values(tensor)
    # Autograd may return a tensor that is only marked as conjugated, and has no real view.
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
