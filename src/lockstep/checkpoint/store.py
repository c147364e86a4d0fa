"""Writing a checkpoint so that it is there whole or not at all, and reading back only what is intact.

checkpoints/step-N/manifest.json, model.safetensors …    committed by renaming a temporary folder
checkpoints/LATEST, BEST                                 name the newest committed one, and the best
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.config.json_text import parse_json
from lockstep.errors import LockstepError
from lockstep.events.event import plain

FORMAT_VERSION = 1

_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 2**20


class CheckpointError(LockstepError):
    """A checkpoint is missing, damaged or of another format."""


def save_checkpoint(
    checkpoints: Path,
    step: int,
    tensors: Mapping[str, Mapping[str, Tensor]],
    facts: Mapping[str, Any],
    *,
    is_best: bool = False,
) -> Path:
    """Commit a file for each name in `tensors` and the JSON values `facts` as `step-N`; point LATEST at it."""
    target = checkpoints / f"step-{step}"
    draft = checkpoints / f".draft-step-{step}-{os.getpid()}"
    replaced = checkpoints / f".replaced-step-{step}-{os.getpid()}"
    draft.mkdir(parents=True)
    try:
        paths = [draft / f"{name}.safetensors" for name in tensors]
        for path, group in zip(paths, tensors.values(), strict=True):
            save_file({name: _own_copy(tensor) for name, tensor in group.items()}, path)
        files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}
        manifest = {**plain(facts), "format": FORMAT_VERSION, "step": step, "files": files}
        (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1, allow_nan=False))
        for path in (*paths, draft / _MANIFEST, draft):
            _flush(path)
        if target.exists():
            target.rename(replaced)  # an earlier attempt's result at the same step
        draft.rename(target)
        _flush(checkpoints)
    except SafetensorError as error:
        raise CheckpointError(f"{target} could not be written: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)
    _point(checkpoints / "LATEST", target.name)
    if is_best:
        _point(checkpoints / "BEST", target.name)
    return target


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest committed checkpoint, or None if nothing was committed yet."""
    return _pointed_at(checkpoints / "LATEST")


def best_checkpoint(checkpoints: Path) -> Path | None:
    """The one that was the best by the run's metric, or None."""
    return _pointed_at(checkpoints / "BEST")


def load_weights(checkpoint: Path, name: str = "model") -> dict[str, Tensor]:
    """The tensors of one of a checkpoint's files, after comparing it with the manifest's hash."""
    file_name = f"{name}.safetensors"
    with (checkpoint / _MANIFEST).open("rb") as file:
        manifest = parse_json(file.read(_MAX_MANIFEST_BYTES))
    if manifest.get("format") != FORMAT_VERSION:
        raise CheckpointError(f"{checkpoint}: format {manifest.get('format')!r}, expected {FORMAT_VERSION}")
    if file_name not in manifest["files"]:
        raise CheckpointError(f"{checkpoint}: has no {file_name}, but {', '.join(manifest['files'])}")
    if _sha256(checkpoint / file_name) != manifest["files"][file_name]["sha256"]:
        raise CheckpointError(f"{checkpoint}: {file_name} does not match its hash")
    return load_file(checkpoint / file_name)


def _own_copy(tensor: Tensor) -> Tensor:
    """Tied weights share memory and channels-last ones are strided: safetensors writes neither as they are."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _point(pointer: Path, name: str) -> None:
    draft = pointer.with_name(f".{pointer.name}.draft")
    draft.write_text(name + "\n")
    _flush(draft)
    draft.replace(pointer)
    _flush(pointer.parent)


def _pointed_at(pointer: Path) -> Path | None:
    try:
        name = pointer.read_text().strip()
    except FileNotFoundError:
        return None
    if not name.removeprefix("step-").isdecimal():
        raise CheckpointError(f"{pointer}: expected a name like step-100, got {name[:40]!r}")
    return pointer.parent / name


def _flush(path: Path) -> None:
    """Bring a file or a folder's entries to the disk; a rename alone orders nothing after a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
