"""Gradient buckets: which gradients are sent together, and their layout in one flat buffer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.torch_internals import copy_all_

# Views are aligned as fresh tensors are: some kernels give different bits at another alignment.
_ALIGNMENT_BYTES = 64


class Bucket(NamedTuple):
    """Parameters whose gradients are sent together, and where each gradient starts in the flat buffer.

    The gradients are followed by one number for each parameter: how many partial sums had a gradient for it.
    """

    indices: tuple[int, ...]  # into the parameter list
    offsets: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    num_gradients: int  # elements, including alignment gaps
    length: int
    dtype: torch.dtype

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's gradient as a view of the buffer."""
        return [
            flat[offset : offset + shape.numel()].view(shape)
            for offset, shape in zip(self.offsets, self.shapes, strict=True)
        ]

    def new_buffer(self, device: torch.device) -> Tensor:
        """Allocate an uninitialized buffer."""
        return torch.empty(self.length, dtype=self.dtype, device=device)

    def pack(self, gradients: Sequence[Tensor | None], flat: Tensor) -> None:
        """Copy gradients into a buffer. A missing gradient counts as zeros."""
        views = self.views(flat)
        flat[self.num_gradients :] = torch.tensor([gradient is not None for gradient in gradients], dtype=self.dtype)
        present = [gradient for gradient in gradients if gradient is not None]
        if len(present) == len(views):
            copy_all_(views, present)
        else:
            for view, gradient in zip(views, gradients, strict=True):
                view.zero_() if gradient is None else view.copy_(gradient)


def make_buckets(parameters: Sequence[Parameter], bucket_bytes: int) -> list[Bucket]:
    """Group parameters into buckets of one dtype, in the order in which a backward pass usually completes them.

    The last parameters come first. The first bucket is a quarter as large, so that communication starts early.
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
