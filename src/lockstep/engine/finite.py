"""Are all these numbers finite? One look at each, and one answer. Asked in every step, so it asks little itself."""

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Waits for the device."""
    groups: dict[tuple[torch.dtype, int], list[Tensor]] = {}
    for tensor in tensors:
        if not tensor.numel():
            continue
        if tensor.requires_grad or tensor.is_sparse or tensor.is_complex():
            tensor = _numbers_of(tensor.detach())
        groups.setdefault((tensor.dtype, tensor.get_device()), []).append(tensor)
    return all(_are_finite(group) for group in groups.values())


def _numbers_of(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        tensor = tensor._values()
    # Autograd may leave a tensor that is only marked as conjugated, of which there is no view.
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _are_finite(tensors: list[Tensor]) -> bool:
    """Of one device and type."""
    if tensors[0].dtype == torch.bfloat16:  # which the kernel below does not have on every device
        return bool(torch.stack(list(torch._foreach_norm(tensors, torch.inf))).isfinite().all())
    # The loss scaler's kernel multiplies by one, and looks on the way: the fastest there is.
    one = _one(tensors[0].device)
    found = torch.zeros_like(one)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)
    return found.item() == 0.0


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)
