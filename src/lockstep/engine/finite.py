"""Are all these numbers finite? One look at each, and one answer."""

from collections.abc import Iterable

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Waits for the device."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        numbers = _numbers_of(tensor.detach())
        groups.setdefault((numbers.device, numbers.dtype), []).append(numbers)
    return all(_are_finite(group) for group in groups.values())


def _numbers_of(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        tensor = tensor._values()
    # Autograd may leave a tensor that is only marked as conjugated, of which there is no view.
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _are_finite(tensors: list[Tensor]) -> bool:
    """Of one device and type."""
    if tensors[0].dtype == torch.bfloat16:  # which the kernel below does not have on every device
        norms = torch._foreach_norm([tensor for tensor in tensors if tensor.numel()], torch.inf)
        return not norms or bool(torch.stack(list(norms)).isfinite().all())
    # The loss scaler's kernel multiplies by one, and looks on the way: the fastest there is.
    found = torch.zeros(1, device=tensors[0].device)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, torch.ones(1, device=found.device))
    return found.item() == 0.0
