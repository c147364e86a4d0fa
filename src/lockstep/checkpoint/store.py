"""Writing a checkpoint so that it is there whole or not at all, and reading back only what is intact.

checkpoints/step-N/model.safetensors, manifest.json      committed by renaming a temporary folder
checkpoints/LATEST                                       names the newest committed one
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

_WEIGHTS = "model.safetensors"
_MANIFEST = "manifest.json"
_MAX_MANIFEST_BYTES = 2**20


class CheckpointError(LockstepError):
    """A checkpoint is missing, damaged or of another format."""


def save_checkpoint(checkpoints: Path, step: int, weights: Mapping[str, Tensor], facts: Mapping[str, Any]) -> Path:
    """Commit `weights` and the JSON values `facts` as `step-N`, and point LATEST at it."""
    target = checkpoints / f"step-{step}"
    draft = checkpoints / f".draft-step-{step}-{os.getpid()}"
    replaced = checkpoints / f".replaced-step-{step}-{os.getpid()}"
    draft.mkdir(parents=True)
    try:
        save_file({name: _own_copy(tensor) for name, tensor in weights.items()}, draft / _WEIGHTS)
        files = {_WEIGHTS: {"bytes": (draft / _WEIGHTS).stat().st_size, "sha256": _sha256(draft / _WEIGHTS)}}
        manifest = {**plain(facts), "format": FORMAT_VERSION, "step": step, "files": files}
        (draft / _MANIFEST).write_text(json.dumps(manifest, indent=1, allow_nan=False))
        for path in (draft / _WEIGHTS, draft / _MANIFEST, draft):
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
    _write_latest(checkpoints, target.name)
    return target


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest committed checkpoint, or None if nothing was committed yet."""
    try:
        name = (checkpoints / "LATEST").read_text().strip()
    except FileNotFoundError:
        return None
    if not name.removeprefix("step-").isdecimal():
        raise CheckpointError(f"{checkpoints / 'LATEST'}: expected a name like step-100, got {name[:40]!r}")
    return checkpoints / name


def load_weights(checkpoint: Path) -> dict[str, Tensor]:
    """A checkpoint's tensors, after comparing their file with the manifest's hash."""
    with (checkpoint / _MANIFEST).open("rb") as file:
        manifest = parse_json(file.read(_MAX_MANIFEST_BYTES))
    if manifest.get("format") != FORMAT_VERSION:
        raise CheckpointError(f"{checkpoint}: format {manifest.get('format')!r}, expected {FORMAT_VERSION}")
    if _sha256(checkpoint / _WEIGHTS) != manifest["files"][_WEIGHTS]["sha256"]:
        raise CheckpointError(f"{checkpoint}: {_WEIGHTS} does not match its hash")
    return load_file(checkpoint / _WEIGHTS)


def _own_copy(tensor: Tensor) -> Tensor:
    """Tied weights share memory and channels-last ones are strided: safetensors writes neither as they are."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _write_latest(checkpoints: Path, name: str) -> None:
    draft = checkpoints / ".LATEST.draft"
    draft.write_text(name + "\n")
    _flush(draft)
    draft.replace(checkpoints / "LATEST")
    _flush(checkpoints)


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
