"""What a rank prints and which files it writes, noted for whoever compares its job with another.

Standard output goes to a file of the rank's own. Files are noted as they are opened for writing or renamed, also by
what the rank starts as a fork; of libraries that write by themselves, outside of Python, torch's and safetensors' are
known.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class WitnessFiles:
    """Of one rank, in the folder of the observation."""

    folder: Path
    rank: int

    @property
    def output(self) -> Path:
        """What it has printed."""
        return self.folder / f"rank-{self.rank}.out"

    @property
    def written(self) -> Path:
        """The paths that it has written to, one a line, as JSON."""
        return self.folder / f"rank-{self.rank}.written"

    @property
    def updates(self) -> Path:
        """What each of its updates has seen and left: see `updates`."""
        return self.folder / f"rank-{self.rank}.updates"

    @property
    def end(self) -> Path:
        """It has made as many updates as it was asked for."""
        return self.folder / f"rank-{self.rank}.end"

    def values(self, update: int) -> Path:
        """Some of the values of each tensor; of rank 0 alone."""
        return self.folder / f"update-{update}.safetensors"


def bear_witness(files: WitnessFiles) -> None:
    """From now on, until this process ends."""
    files.folder.mkdir(parents=True, exist_ok=True)
    output = _opened(files.output)
    sys.stdout.flush()
    os.dup2(output, 1)
    os.close(output)
    note = _Notes(_opened(files.written))
    sys.addaudithook(note.event)
    _note_savers(note)


def _opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class _Notes:
    """Each path once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._known: set[str] = set()

    def event(self, name: str, args: tuple[Any, ...]) -> None:
        """As Python tells it: [PEP 578]. Whatever is odd about it is the script's business."""
        if name == "open" and isinstance(args[2], int) and args[2] & _WRITES:
            self.path(args[0])
        elif name == "os.rename":
            self.path(args[1])

    def path(self, path: Any) -> None:
        with suppress(Exception):
            text = os.path.abspath(os.fsdecode(path))  # noqa: PTH100  (a number is a file that is open already)
            if text not in self._known:
                self._known.add(text)
                os.write(self._descriptor, json.dumps(text).encode() + b"\n")


def _note_savers(note: _Notes) -> None:
    import safetensors.torch
    import torch

    def noting(save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def noted(*args: Any, **kwargs: Any) -> Any:
            note.path(args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename")))
            return save(*args, **kwargs)

        return noted

    torch.save = noting(torch.save)  # before the script imports it
    # What `save_file` calls, which may have been imported by its name already.
    safetensors.torch.serialize_file = noting(safetensors.serialize_file)  # type: ignore[attr-defined]
