"""Records what a rank prints and which files it writes, for `lockstep verify`.

Standard output goes to a file of the rank. Paths are recorded as they are opened for writing or renamed, in forks of
the rank too. Of the libraries that write files without Python's `open`, those of torch and safetensors are covered.

[Note: safetensors names]

`safetensors.torch.save_file` looks up `serialize_file` in its own module when it is called. That is not documented;
checked with safetensors 0.8. If it changes, the record lacks the files that a script saves through a `save_file` that
it imported by name, and `tests/unit/supervision/test_io_recorder.py` fails.
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

_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@dataclass(frozen=True)
class OutputRecord:
    """The files that hold the record of one rank."""

    folder: Path
    rank: int

    @property
    def output(self) -> Path:
        """What it printed."""
        return self.folder / f"rank-{self.rank}.out"

    @property
    def written(self) -> Path:
        """The paths that it wrote to, one per line, as JSON."""
        return self.folder / f"rank-{self.rank}.written"

    @property
    def updates(self) -> Path:
        """The inputs and the results of each of its updates; see `supervision.step_recorder`."""
        return self.folder / f"rank-{self.rank}.updates"

    @property
    def end(self) -> Path:
        """A file that exists once the rank has made the requested number of updates, or has ended."""
        return self.folder / f"rank-{self.rank}.end"

    def values(self, update: int) -> Path:
        """Some values of each tensor after an update; written by rank 0 only."""
        return self.folder / f"update-{update}.safetensors"


def record_output(files: OutputRecord) -> None:
    """Record what this process prints and writes, from now until it ends."""
    files.folder.mkdir(parents=True, exist_ok=True)
    output = _open_for_append(files.output)
    sys.stdout.flush()
    os.dup2(output, 1)
    os.close(output)
    recorder = _PathRecorder(_open_for_append(files.written))
    sys.addaudithook(recorder.on_audit_event)
    _record_tensor_files(recorder)


def _open_for_append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class _PathRecorder:
    """Writes each path once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._known: set[str] = set()

    def on_audit_event(self, name: str, args: tuple[Any, ...]) -> None:
        """Handle an audit event of Python (PEP 578)."""
        if name == "open" and isinstance(args[2], int) and args[2] & _WRITE_FLAGS:
            self.record(args[0])
        elif name == "os.rename":
            self.record(args[1])

    def record(self, path: Any) -> None:
        """Record a path. A file object or a descriptor was already recorded when it was opened."""
        with suppress(Exception):
            text = os.path.abspath(os.fsdecode(path))  # noqa: PTH100  (resolving links would name another path)
            if text not in self._known:
                self._known.add(text)
                os.write(self._descriptor, json.dumps(text).encode() + b"\n")


def _record_tensor_files(recorder: _PathRecorder) -> None:
    """Wrap the functions of torch and safetensors that write files without Python's `open`."""
    import safetensors.torch
    import torch

    def recorded(save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def save_and_record(*args: Any, **kwargs: Any) -> Any:
            recorder.record(args[1] if len(args) > 1 else kwargs.get("f", kwargs.get("filename")))
            return save(*args, **kwargs)

        return save_and_record

    torch.save = recorded(torch.save)  # before the script imports it
    # `save_file` may have been imported by name already, so wrap what it calls: [Note: safetensors names].
    safetensors.torch.serialize_file = recorded(safetensors.serialize_file)  # type: ignore[attr-defined]
