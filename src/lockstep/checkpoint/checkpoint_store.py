"""Where checkpoints are committed (`CheckpointStore.commit`), found, loaded and pruned in a run's folder.

checkpoints/.draft-step-N-…/                             a save that is being written
checkpoints/step-N/manifest.json, model.safetensors …    committed: a draft, flushed to disk and then renamed
checkpoints/LATEST, BEST                                 name the newest and the best, for people and other programs

A checkpoint is there whole or not at all, and is verified when it is read. lockstep itself finds the newest and the
best from the folders, not from LATEST and BEST: a kill can come between a commit and the update of these files.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from lockstep.checkpoint import durable_files
from lockstep.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, read_manifest
from lockstep.checkpoint.tensor_files import assemble, read_tensor_file
from lockstep.world.serialization import join_values

_FOLDER_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_REPLACED = ".replaced-"  # prefix of a checkpoint that is being replaced by another one of the same step
_LEFTOVERS = (".draft-", ".removed-", ".LATEST.draft", ".BEST.draft")
_MAX_POINTER_BYTES = 200


class Retention(NamedTuple):
    """Which checkpoints to keep: the newest `keep`, those of every `keep_every`-th step, and always the best."""

    keep: int = 3
    keep_every: int | None = None

    def keeps(self, num_newer: int, step: int) -> bool:
        """Is the checkpoint of `step` kept, if `num_newer` are newer?"""
        return num_newer < self.keep or (self.keep_every is not None and step % self.keep_every == 0)


class Checkpoint(NamedTuple):
    """A checkpoint that was loaded and verified."""

    path: Path
    manifest: Manifest
    values: dict[str, Any]  # by part


@dataclass(frozen=True)
class CheckpointStore:
    """A folder of checkpoints, such as `RUN/checkpoints`. It need not exist."""

    folder: Path

    def steps(self) -> list[int]:
        """List the steps of the committed checkpoints, the newest first."""
        if not self.folder.is_dir():
            return []
        matches = (_FOLDER_NAME.fullmatch(path.name.removeprefix(_REPLACED)) for path in self.folder.iterdir())
        return sorted({int(match[1]) for match in matches if match}, reverse=True)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint. A kill can leave it under the name it gets while it is replaced."""
        path = self.folder / f"step-{step}"
        replaced = _replaced(path)
        return replaced if replaced.exists() and not path.exists() else path

    def manifest(self, step: int) -> Manifest:
        """Read a step's manifest."""
        path = self.path(step)
        manifest = read_manifest(path)
        if manifest.step != step:
            raise CheckpointError(f"{path}: holds step {manifest.step}, so the folder was renamed or replaced")
        return manifest

    def find(self, commit: str) -> Manifest | None:
        """Return the manifest of the checkpoint with this commit name, or None."""
        for step in self.steps():
            with suppress(CheckpointError):
                manifest = self.manifest(step)
                if manifest.commit == commit:
                    return manifest
        return None

    def load(self, step: int) -> Checkpoint:
        """Load a checkpoint, comparing every file with its hash."""
        path, manifest = self.path(step), self.manifest(step)
        files = {name: read_tensor_file(path, name, stored) for name, stored in manifest.files.items()}
        values = {}
        try:
            for part, form in manifest.forms.items():
                sharded = assemble(manifest.shards.get(part, {}), files)
                values[part] = join_values(form, files.get(f"{part}.safetensors", {}) | sharded)
        except ValueError as error:
            raise CheckpointError(f"{path}: {MANIFEST}: {error}") from None
        return Checkpoint(path, manifest, values)

    def newest_intact(
        self, run_id: str, warn: Callable[[str], None], check: Callable[[Checkpoint], None] | None = None
    ) -> Checkpoint | None:
        """Load the newest intact checkpoint of this run.

        Args:
            run_id: checkpoints of other runs are skipped.
            warn: called with the reason for each checkpoint that is skipped.
            check: raises a CheckpointError for a checkpoint whose content is not what the caller needs.
        """
        for step in self.steps():
            try:
                found = self.load(step)
                if check is not None and found.manifest.run_id == run_id:
                    check(found)
            except CheckpointError as error:
                warn(str(error))
                continue
            if found.manifest.run_id == run_id:
                return found
            warn(f"{found.path}: belongs to another run ({found.manifest.run_id}; this one is {run_id})")
        return None

    def draft(self, step: int, token: str) -> Path:
        """Return the folder in which a save puts its files before it is committed."""
        return self.folder / f".draft-step-{step}-{token}"

    def commit(self, draft: Path, manifest: Manifest) -> Path:
        """Turn a draft, whose files are all flushed to disk, into a checkpoint by renaming it."""
        durable_files.write_file(draft / MANIFEST, manifest.text())
        durable_files.flush(draft)
        durable_files.flush(self.folder.parent)  # this save, or one that was killed, may have just created our folder
        target = self.folder / f"step-{manifest.step}"
        replaced = _replaced(target)
        if target.exists():
            durable_files.remove_folder(replaced)
            durable_files.rename(target, replaced)
        durable_files.rename(draft, target)
        durable_files.remove_folder(replaced)
        return target

    def update_pointers(self, manifest: Manifest) -> None:
        """Make LATEST, and BEST if it is the best, name the checkpoint that was just committed."""
        pointer = f"step-{manifest.step} {manifest.commit}\n".encode()
        durable_files.replace_file(self.folder / "LATEST", pointer)
        if manifest.is_best:
            durable_files.replace_file(self.folder / "BEST", pointer)

    def prune(self, retention: Retention, newest: int) -> None:
        """Remove the checkpoints that `retention` does not keep.

        Args:
            retention: which ones to keep. The best one is always kept.
            newest: the step that was committed last. Later ones were damaged and passed over when the run resumed:
                they are kept, and do not count as newer.
        """
        best = self.newest_readable_best()
        for num_newer, step in enumerate(step for step in self.steps() if step <= newest):
            if not retention.keeps(num_newer, step) and step != best:
                durable_files.remove_folder(self.path(step))

    def best(self) -> int | None:
        """Return the step of the best checkpoint: the newest whose manifest says that it was the best when saved.

        If a newer manifest cannot be read, it might have been that one. BEST then decides, if it names a checkpoint
        that is marked as best; otherwise it is an error.
        """
        for step in self.steps():
            try:
                if self.manifest(step).is_best:
                    return step
            except CheckpointError:
                if not self.path(step).exists():
                    continue  # the running job has just pruned it, and it never prunes the best
                named = self._named_best()
                if named is None:
                    raise
                return named
        return None

    def newest_readable_best(self) -> int | None:
        """Return the best step among the readable manifests: for callers that may miss a damaged best."""
        return next(filter(self.is_marked_best, self.steps()), None)

    def is_marked_best(self, step: int, commit: str | None = None) -> bool:
        """Does the checkpoint of this step (and of this commit, if given) say that it was the best when saved?"""
        with suppress(CheckpointError):
            manifest = self.manifest(step)
            return manifest.is_best and commit in (None, manifest.commit)
        return False

    def _named_best(self) -> int | None:
        """Return the step that BEST names, if that checkpoint says the same."""
        try:
            name, commit = durable_files.read_start(self.folder / "BEST", _MAX_POINTER_BYTES).decode().split()
        except (OSError, ValueError):
            return None
        match = _FOLDER_NAME.fullmatch(name)
        return int(match[1]) if match and self.is_marked_best(int(match[1]), commit) else None

    def tidy(self) -> None:
        """Remove what killed processes left behind. Call it only while no other process writes here."""
        if not self.folder.is_dir():
            return
        for path in list(self.folder.iterdir()):
            if path.name.startswith(_LEFTOVERS):
                durable_files.remove_folder(path)
            elif path.name.startswith(_REPLACED):
                target = path.with_name(path.name.removeprefix(_REPLACED))
                if target.exists():
                    durable_files.remove_folder(path)
                else:
                    durable_files.rename(path, target)


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """Return the newest committed checkpoint, or None if nothing was committed yet."""
    store = CheckpointStore(checkpoints)
    return next((store.path(step) for step in store.steps()), None)


def best_checkpoint(checkpoints: Path) -> Path | None:
    """Return the best checkpoint by the run's metric, or None."""
    store = CheckpointStore(checkpoints)
    step = store.best()
    return None if step is None else store.path(step)


def load_weights(checkpoint: Path, name: str = "model") -> dict[str, Tensor]:
    """Load the tensors of one part of a checkpoint, comparing its files with their hashes."""
    manifest, file_name = read_manifest(checkpoint), f"{name}.safetensors"
    sharded = manifest.shards.get(name, {})
    wanted = {file_name} | {piece.file for tensor in sharded.values() for piece in tensor.pieces}
    files = {each: read_tensor_file(checkpoint, each, manifest.files[each]) for each in wanted & manifest.files.keys()}
    if not files:
        raise CheckpointError(f"{checkpoint}: has no {file_name}; it has {', '.join(manifest.files)}")
    try:
        return files.get(file_name, {}) | assemble(sharded, files)
    except ValueError as error:
        raise CheckpointError(f"{checkpoint}: {MANIFEST}: {error}") from None


def _replaced(path: Path) -> Path:
    return path.with_name(_REPLACED + path.name)
