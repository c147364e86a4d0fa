"""A copy of tensors in main memory, so that training can go on while they are written.

The memory is kept from one save to the next: fresh memory costs several times what the copying does.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


class Staging:
    def __init__(self) -> None:
        self._copies: dict[str, dict[str, Tensor]] = {}  # by file

    def copy(self, files: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """The files' tensors as they are now, contiguous, each in memory of its own. It holds until the next call."""
        self._copies = {file: self._copy(tensors, self._copies.get(file, {})) for file, tensors in files.items()}
        on_gpu = next((t.device for tensors in files.values() for t in tensors.values() if t.is_cuda), None)
        if on_gpu is not None:
            torch.cuda.current_stream(on_gpu).synchronize()
        return self._copies

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor], earlier: Mapping[str, Tensor]) -> dict[str, Tensor]:
        copies = {name: _room_for(tensor, earlier.get(name)) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            copies[name].copy_(tensor, non_blocking=True)
        return copies


def _room_for(tensor: Tensor, earlier: Tensor | None) -> Tensor:
    if earlier is not None and earlier.shape == tensor.shape and earlier.dtype == tensor.dtype:
        return earlier
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
