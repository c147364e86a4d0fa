"""What an evaluation finds around it: the same for every design, whatever the one before has done to it.

A function may well choose its threads, switch gradients off or go to a folder of its own. Left like that, the next
design would find other settings on this rank than on another, and the run would go on writing somewhere else.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import torch


class _Surroundings(NamedTuple):
    folder: Path | None  # None: it is gone
    threads: int
    default_dtype: torch.dtype
    has_gradients: bool
    is_deterministic: bool
    only_warns: bool  # of what is not deterministic

    @classmethod
    def now(cls) -> Self:
        try:
            folder = Path.cwd()
        except FileNotFoundError:
            folder = None
        return cls(
            folder,
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def put_back(self) -> None:
        if self.folder is not None:
            os.chdir(self.folder)
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.default_dtype)
        torch.set_grad_enabled(self.has_gradients)
        torch.use_deterministic_algorithms(self.is_deterministic, warn_only=self.only_warns)


@contextmanager
def undisturbed_surroundings() -> Iterator[None]:
    """Put back afterwards: the working directory, and torch's threads, default type, gradient mode and determinism."""
    before = _Surroundings.now()
    try:
        yield
    finally:
        if _Surroundings.now() != before:
            before.put_back()
