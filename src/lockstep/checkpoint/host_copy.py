"""Copy tensors to host memory, so that training can continue while they are written. [Note: late copies]

The memory is reused from one save to the next: allocating fresh memory costs several times as much as copying.

Copying stalls training, so it is deferred where that is safe: tensors that only the next optimizer update will change
can be copied during the next forward and backward pass, and the update waits for the copy. If a script changes them
anyway, by reaching into its optimizer, their version counter shows it and the copy is not used.
"""

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.engine.torch_internals import version_of

Files = Mapping[str, Mapping[str, Tensor]]


class ChangedWhileCopiedError(Exception):
    """A tensor that only an optimizer update may change was changed by something else while it was copied."""


class HostCopies:
    """The copies that one rank writes, by file, in memory that is reused."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, Tensor]] = {}  # valid until the next `begin`
        self._late: Files = {}
        self._versions: dict[str, list[int]] = {}
        self._is_done = threading.Event()
        self._is_done.set()

    def begin(self, files: Files, late: Files) -> None:
        """Copy `files` now. `late` is copied by `finish`, and must not change until `wait` returns."""
        # Copying from a GPU is quick, and doing it in another thread would need another stream: do it now.
        on_gpu = {name: tensors for name, tensors in late.items() if any(t.is_cuda for t in tensors.values())}
        self._late = {name: tensors for name, tensors in late.items() if name not in on_gpu}
        self._versions = {name: _versions(tensors) for name, tensors in self._late.items()}
        self.files = {name: self._allocate(name, tensors) for name, tensors in {**files, **late}.items()}
        self._copy({**files, **on_gpu})
        if self._late:
            self._is_done.clear()

    def finish(self) -> None:
        """Make the late copies; called by the thread that writes them."""
        try:
            self._copy(self._late)
            changed = [name for name, tensors in self._late.items() if _versions(tensors) != self._versions[name]]
        finally:
            self._late = {}
            self._is_done.set()
        if changed:
            raise ChangedWhileCopiedError(
                f"{', '.join(changed)}: changed outside of step.update() while it was being saved"
            )

    def wait(self) -> None:
        """Wait until all tensors may change again."""
        self._is_done.wait()

    @torch.no_grad()
    def _copy(self, files: Files) -> None:
        for file, tensors in files.items():
            for name, tensor in tensors.items():
                self.files[file][name].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensors in files.values() for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()

    def _allocate(self, file: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        earlier = self.files.get(file, {})
        return {name: _reuse_or_allocate(tensor, earlier.get(name)) for name, tensor in tensors.items()}


def _reuse_or_allocate(tensor: Tensor, earlier: Tensor | None) -> Tensor:
    if earlier is not None and earlier.shape == tensor.shape and earlier.dtype == tensor.dtype:
        return earlier
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _versions(tensors: Mapping[str, Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in tensors.values()]
