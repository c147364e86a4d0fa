"""How gradients lie in the flat buffers that travel between ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

# Views begin where a fresh tensor would: some kernels give other bits on memory that is aligned otherwise.
_ALIGNMENT_BYTES = 64


class Bucket(NamedTuple):
    """Parameters whose gradients travel together, and where each begins in the buffer.

    After the gradients stands one number per parameter: how many tree nodes had a gradient for it at all.
    """

    indices: tuple[int, ...]  # into the parameter list
    offsets: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    num_gradients: int  # elements, gaps included
    length: int
    dtype: torch.dtype

    def views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[offset : offset + shape.numel()].view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def new_buffer(self, device: torch.device) -> Tensor:
        return torch.empty(self.length, dtype=self.dtype, device=device)

    def pack(self, gradients: Sequence[Tensor | None], flat: Tensor) -> None:
        """Copy gradients into a buffer; a missing one counts as zeros."""
        views = self.views(flat)
        flat[self.num_gradients :] = torch.tensor([gradient is not None for gradient in gradients], dtype=self.dtype)
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) == len(views):
            torch._foreach_copy_(views, present)
        else:
            for view, gradient in zip(views, gradients, strict=True):
                view.zero_() if gradient is None else view.copy_(gradient)


def make_buckets(parameters: Sequence[Parameter], bucket_bytes: int) -> list[Bucket]:
    """Buckets in the order in which a backward pass usually completes them: the last parameters first.

    The first bucket is a quarter as large, so that the exchange starts early.
    """
    buckets: list[Bucket] = []
    open_buckets: dict[torch.dtype, list[int]] = {}
    limit = bucket_bytes // 4
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        indices = open_buckets.setdefault(parameter.dtype, [])
        indices.append(index)
        if sum(parameters[i].nbytes for i in indices) >= limit:
            buckets.append(_lay_out(parameters, open_buckets.pop(parameter.dtype)))
            limit = bucket_bytes
    buckets += [_lay_out(parameters, indices) for indices in open_buckets.values()]
    return buckets


def _lay_out(parameters: Sequence[Parameter], indices: Sequence[int]) -> Bucket:
    first = parameters[indices[0]]
    alignment = max(1, _ALIGNMENT_BYTES // first.element_size())
    offsets, end = [], 0
    for index in indices:
        offsets.append(end)
        end += -(-parameters[index].numel() // alignment) * alignment
    return Bucket(
        indices=tuple(indices),
        offsets=tuple(offsets),
        shapes=tuple(parameters[index].shape for index in indices),
        num_gradients=end,
        length=end + len(indices),
        dtype=first.dtype,
    )
