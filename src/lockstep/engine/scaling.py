"""Gradients times a number."""

from collections.abc import Sequence

import torch
from torch import Tensor


def scale_gradients(gradients: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply by a number, in place, with the same bits whether it happens tensor by tensor or in a flat buffer.

    Torch computes with a number in another precision where it meets one as a number, as a tensor, in a list, or meets a
    tensor without dimensions: so it is a tensor always, of the precision to compute in.
    """
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for gradient in gradients:
        by_kind.setdefault((gradient.dtype, gradient.device), []).append(gradient)
    for (dtype, device), alike in by_kind.items():
        computed_in = torch.promote_types(dtype, torch.float32)
        is_double = computed_in in (torch.float64, torch.complex128)
        factor = scale.to(device, torch.float64 if is_double else torch.float32)  # they may lie in main memory
        if computed_in == dtype:
            torch._foreach_mul_(alike, factor)
        else:
            for gradient in alike:
                gradient.copy_(gradient.to(computed_in).mul_(factor))
