"""A copy of tensors in main memory, so that training can go on while they are written. [Note: late copies]

The memory is kept from one save to the next: fresh memory costs several times what the copying does.

Copying holds the training up, so it is put off where that is safe: what only the next update will change can be copied
beside the forward and backward pass, if the update waits for it. Should it have been changed all the same, by a script
that reaches into its optimizer, its version tells, and the copy is not used.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

Files = Mapping[str, Mapping[str, Tensor]]


class ChangedWhileCopied(Exception):
    """A tensor that only an update should change."""


class Staging:
    def __init__(self) -> None:
        self.copies: dict[str, dict[str, Tensor]] = {}  # by file; they hold until the next `begin`
        self._late: Files = {}
        self._versions: dict[str, list[int]] = {}
        self._is_done = threading.Event()
        self._is_done.set()

    def begin(self, files: Files, late: Files) -> None:
        """Copy `files` as they are now. What is `late` waits for `finish`, and must not change until `wait` returns."""
        # On a GPU a copy is quick, and another thread's would need another stream.
        on_gpu = {name: tensors for name, tensors in late.items() if any(t.is_cuda for t in tensors.values())}
        self._late = {name: tensors for name, tensors in late.items() if name not in on_gpu}
        self._versions = {name: _versions(tensors) for name, tensors in self._late.items()}
        self.copies = {name: self._room_for(name, tensors) for name, tensors in {**files, **late}.items()}
        self._copy({**files, **on_gpu})
        if self._late:
            self._is_done.clear()

    def finish(self) -> None:
        """Make the late copies; for the thread that writes them."""
        try:
            self._copy(self._late)
            changed = [name for name, tensors in self._late.items() if _versions(tensors) != self._versions[name]]
        finally:
            self._late = {}
            self._is_done.set()
        if changed:
            raise ChangedWhileCopied(f"{', '.join(changed)}: changed outside of step.update() while it was being saved")

    def wait(self) -> None:
        """Until everything may change again."""
        self._is_done.wait()

    @torch.no_grad()
    def _copy(self, files: Files) -> None:
        for file, tensors in files.items():
            for name, tensor in tensors.items():
                self.copies[file][name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensors in files.values() for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _room_for(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        earlier = self.copies.get(file, {})
        return {name: _room_for(tensor, earlier.get(name)) for name, tensor in tensors.items()}


def _room_for(tensor: Tensor, earlier: Tensor | None) -> Tensor:
    if earlier is not None and earlier.shape == tensor.shape and earlier.dtype == tensor.dtype:
        return earlier
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _versions(tensors: Mapping[str, Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors.values()]
