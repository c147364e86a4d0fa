"""The folder of checkpoints: each is there whole or not at all, and only what is intact is read back.

checkpoints/step-N/manifest.json, model.safetensors …    committed by renaming a draft
checkpoints/LATEST, BEST                                 name the newest and the best, for people and other programs

The folders themselves are asked which these are: a kill may come between a commit and the pointers' move.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lockstep.checkpoint import disk
from lockstep.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, StoredFile, one_line, read_manifest
from lockstep.checkpoint.shards import assemble
from lockstep.world.plain_values import join

_FOLDER_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_ASIDE = ".replaced-"  # before the name of a checkpoint that makes room for another of the same step
_LEFTOVERS = (".draft-", ".removed-", ".LATEST.draft", ".BEST.draft")
_MAX_POINTER_BYTES = 200


class Retention(NamedTuple):
    """Which checkpoints stay: the newest `keep`, those of every `keep_every`-th step, and the best."""

    keep: int = 3
    keep_every: int | None = None

    def stays(self, age: int, step: int) -> bool:
        """`age`: how many are newer."""
        return age < self.keep or (self.keep_every is not None and step % self.keep_every == 0)


class Checkpoint(NamedTuple):
    path: Path
    manifest: Manifest
    values: dict[str, Any]  # by part


@dataclass(frozen=True)
class Store:
    folder: Path

    def steps(self) -> list[int]:
        """Of the committed checkpoints, the newest first."""
        return sorted(_found(self.folder), reverse=True)

    def path(self, step: int) -> Path:
        """Where it is; a kill can leave one set aside for a successor that never came."""
        path = self.folder / f"step-{step}"
        aside = _aside(path)
        return aside if aside.exists() and not path.exists() else path

    def manifest(self, step: int) -> Manifest:
        path = self.path(step)
        manifest = read_manifest(path)
        if manifest.step != step:
            raise CheckpointError(f"{path}: holds step {manifest.step}, so it is not where it was written")
        return manifest

    def find(self, commit: str) -> Manifest | None:
        """Of the checkpoint that a save of this name made, if it is there."""
        for step in self.steps():
            with suppress(CheckpointError):
                manifest = self.manifest(step)
                if manifest.commit == commit:
                    return manifest
        return None

    def load(self, step: int) -> Checkpoint:
        """All of it, every file compared with its hash."""
        path, manifest = self.path(step), self.manifest(step)
        files = {name: read_file(path, name, stored) for name, stored in manifest.files.items()}
        try:
            values = {
                part: join(form, files.get(f"{part}.safetensors", {}) | assemble(manifest.shards.get(part, {}), files))
                for part, form in manifest.forms.items()
            }
        except ValueError as error:
            raise CheckpointError(f"{path}: {MANIFEST}: {error}") from None
        return Checkpoint(path, manifest, values)

    def newest_intact(self, run_id: str, tell: Callable[[str], None]) -> Checkpoint | None:
        """The newest that loads; `tell` is called with what is wrong with each one passed over."""
        for step in self.steps():
            try:
                found = self.load(step)
            except CheckpointError as error:
                tell(str(error))
                continue
            if found.manifest.run_id == run_id:
                return found
            tell(f"{found.path}: is of another run ({found.manifest.run_id}, and this one is {run_id})")
        return None

    def draft(self, step: int, token: str) -> Path:
        """Where a save's files go before it is committed."""
        return self.folder / f".draft-step-{step}-{token}"

    def commit(self, draft: Path, manifest: Manifest) -> Path:
        """Make a draft whose files are all on the disk a checkpoint."""
        disk.write_file(draft / MANIFEST, manifest.text())
        disk.flush(draft)
        disk.flush(self.folder.parent)  # where our own entry may be new: of this save, or of one that was killed
        target = self.folder / f"step-{manifest.step}"
        aside = _aside(target)
        if target.exists():
            disk.remove_folder(aside)
            disk.rename(target, aside)
        disk.rename(draft, target)
        disk.remove_folder(aside)
        return target

    def point_at(self, manifest: Manifest) -> None:
        """Move the pointers to what was committed last."""
        pointer = f"step-{manifest.step} {manifest.commit}\n".encode()
        disk.replace_file(self.folder / "LATEST", pointer)
        if manifest.is_best:
            disk.replace_file(self.folder / "BEST", pointer)

    def prune(self, retention: Retention, newest: int) -> None:
        """Remove what is not to stay; the best does, whatever its age. `newest`: what was committed last.

        There may be later ones, damaged and passed over when the run resumed: those do not make `newest` older.
        """
        best = self.readable_best()
        for age, step in enumerate(step for step in self.steps() if step <= newest):
            if not retention.stays(age, step) and step != best:
                disk.remove_folder(self.path(step))

    def best(self) -> int | None:
        """The step that was the best: the newest that says so of itself.

        One that cannot be read may have been: then BEST is believed, if it names an earlier one, or it is an error.
        """
        for step in self.steps():
            try:
                if self.manifest(step).is_best:
                    return step
            except CheckpointError:
                if not self.path(step).exists():
                    continue  # a run that is going on has just removed it, and never removes the best
                named = self._named_best()
                if named is None:
                    raise
                return named
        return None

    def readable_best(self) -> int | None:
        """The newest that can be read and says so: for those who can live with a damaged best that they miss."""
        return next(filter(self.says_best, self.steps()), None)

    def says_best(self, step: int, commit: str | None = None) -> bool:
        """Does a checkpoint, or that very commit of it, say that it was the best when it was saved?"""
        with suppress(CheckpointError):
            manifest = self.manifest(step)
            return manifest.is_best and commit in (None, manifest.commit)
        return False

    def _named_best(self) -> int | None:
        try:
            name, commit = disk.read_start(self.folder / "BEST", _MAX_POINTER_BYTES).decode().split()
        except (OSError, ValueError):
            return None
        match = _FOLDER_NAME.fullmatch(name)
        return int(match[1]) if match and self.says_best(int(match[1]), commit) else None

    def tidy(self) -> None:
        """Clear away what kills have left. Only while no other process writes here."""
        if not self.folder.is_dir():
            return
        for path in list(self.folder.iterdir()):
            if path.name.startswith(_LEFTOVERS):
                disk.remove_folder(path)
            elif path.name.startswith(_ASIDE):
                target = path.with_name(path.name.removeprefix(_ASIDE))
                if target.exists():
                    disk.remove_folder(path)
                else:
                    disk.rename(path, target)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """A new file of contiguous tensors in main memory, brought to the disk."""
    save_file(dict(tensors), path)
    with ThreadPoolExecutor(1) as thread:  # the disk is slow and the hash takes the processor: side by side
        flushing = thread.submit(disk.flush, path)
        stored = StoredFile(path.stat().st_size, disk.content_hash(path))
        flushing.result()
    return stored


def write_tensors_to_memory(path: Path, tensors: Mapping[str, Tensor]) -> StoredFile:
    """The same where no disk is waited for: all of it in the caller's thread, whose time is then what it cost."""
    save_file(dict(tensors), path)
    return StoredFile(path.stat().st_size, disk.content_hash(path, max_threads=1))


def read_file(checkpoint: Path, name: str, stored: StoredFile) -> dict[str, Tensor]:
    """A file's tensors, after comparing it with what the manifest says."""
    path = checkpoint / name
    try:
        size = os.lstat(path).st_size
        if size != stored.size:
            raise CheckpointError(f"{checkpoint}: {name} has {size:,} bytes instead of {stored.size:,}")
        if disk.content_hash(path) != stored.sha256:
            raise CheckpointError(f"{checkpoint}: {name} does not match its hash")
        return load_file(path)
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: {name} cannot be read: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{checkpoint}: {name} is not what safetensors reads: {one_line(error)}") from None


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest committed checkpoint, or None if nothing was committed yet."""
    store = Store(checkpoints)
    return next((store.path(step) for step in store.steps()), None)


def best_checkpoint(checkpoints: Path) -> Path | None:
    """The one that was the best by the run's metric, or None."""
    store = Store(checkpoints)
    step = store.best()
    return None if step is None else store.path(step)


def load_weights(checkpoint: Path, name: str = "model") -> dict[str, Tensor]:
    """The tensors of one of a checkpoint's parts, whole, after comparing its files with the manifest's hashes."""
    manifest, file_name = read_manifest(checkpoint), f"{name}.safetensors"
    sharded = manifest.shards.get(name, {})
    wanted = {file_name} | {piece.file for tensor in sharded.values() for piece in tensor.pieces}
    files = {each: read_file(checkpoint, each, manifest.files[each]) for each in wanted & manifest.files.keys()}
    if not files:
        raise CheckpointError(f"{checkpoint}: has no {file_name}, but {', '.join(manifest.files)}")
    try:
        return files.get(file_name, {}) | assemble(sharded, files)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: {MANIFEST}: {error}") from None


def _found(folder: Path) -> Iterator[int]:
    names = {path.name.removeprefix(_ASIDE) for path in folder.iterdir()} if folder.is_dir() else set()
    for name in names:
        if match := _FOLDER_NAME.fullmatch(name):
            yield int(match[1])


def _aside(path: Path) -> Path:
    return path.with_name(_ASIDE + path.name)
