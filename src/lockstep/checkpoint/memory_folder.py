"""A run's folder for snapshots in shared memory: claim and lock it, and remove abandoned ones.

MEMORY/lockstep-UID-RUN_ID/.lock      held by rank 0 while it trains
                           .run       the path of the run folder
                           step-N/    a snapshot, in the format of a checkpoint

Anyone can write to /dev/shm, so a folder is used only if it belongs to this user and nobody else can access it.
"""

import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from lockstep.checkpoint import durable_files
from lockstep.errors import UserError
from lockstep.events.run_folder import RunFolder

_RUN_ID = re.compile(r"[0-9a-f]{16,64}")
_MAX_AGE_S = 24 * 3600.0  # older folders are removed
_GRACE_FOR_NEW_S = 60.0
_MAX_PATH_BYTES = 4096
_LOCK_TIMEOUT_S = 1.0  # another run that looks for abandoned folders holds the lock for a moment
_LOCK_POLL_S = 0.02
_LOCK, _RUN = ".lock", ".run"


class MemoryFolderError(Exception):
    """The run cannot have a folder in memory; the message says why."""


@dataclass(frozen=True)
class MemoryFolder:
    """A folder in shared memory, locked by this process."""

    path: Path
    lock: TextIO

    def release(self) -> None:
        """Release the lock and leave the content for the next attempt."""
        self.lock.close()

    def remove(self) -> None:
        """Remove the folder with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


def memory_folder_path(memory: Path, run_id: str) -> Path:
    """Return the path of a run's folder under `memory`, such as /dev/shm."""
    if not _RUN_ID.fullmatch(run_id):
        raise MemoryFolderError(f"the run id {run_id[:40]!r} in run.json is not valid: expected 16 to 64 hex digits")
    return memory / f"{_prefix()}{run_id}"


def claim_memory_folder(path: Path, run_folder: Path) -> MemoryFolder:
    """Create or reopen the run's folder at `path` and lock it.

    Content left by an earlier attempt is kept, unless it belongs to a run folder at another path, such as the original
    of a copied one: then it is removed.
    """
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if not _is_private(path):
            raise MemoryFolderError(f"{path} is not a folder that only you can access: remove it")
        deadline = time.monotonic() + _LOCK_TIMEOUT_S
        while (lock := _try_lock(path)) is None and time.monotonic() < deadline:
            time.sleep(_LOCK_POLL_S)
        if lock is None:
            raise MemoryFolderError(f"{path} is in use by another process")
        try:
            if _run_folder(path) != run_folder.resolve():
                for entry in path.iterdir():
                    if entry.name != _LOCK:
                        durable_files.remove_folder(entry)
                durable_files.replace_file(path / _RUN, os.fsencode(run_folder.resolve()))
        except BaseException:
            lock.close()
            raise
        return MemoryFolder(path, lock)
    except OSError as error:
        raise MemoryFolderError(f"{path}: {error.strerror or error}") from None


def sweep_memory_folders(memory: Path, spare: Path) -> None:
    """Remove this user's folders under `memory` that are too old or whose run folder is gone.

    Args:
        memory: where the folders are, such as /dev/shm.
        spare: this run's own folder. It is in use, and even checking its lock would release that lock.
    """
    for path in _own_folders(memory):
        with suppress(OSError):
            lock = _try_lock(path) if path != spare and _is_private(path) else None
            if lock is None:
                continue
            with lock:
                if _is_abandoned(path):
                    shutil.rmtree(path, ignore_errors=True)


def _own_folders(memory: Path) -> Iterator[Path]:
    with suppress(OSError):
        for path in list(memory.iterdir()):
            if path.name.startswith(_prefix()) and _RUN_ID.fullmatch(path.name.removeprefix(_prefix())):
                yield path


def _is_abandoned(path: Path) -> bool:
    age_s = time.time() - path.stat().st_mtime
    if age_s > _MAX_AGE_S:
        return True
    run_folder = _run_folder(path)
    if run_folder is None:  # it is just being created, or its process was killed meanwhile
        return age_s > _GRACE_FOR_NEW_S
    try:
        return path.name != _prefix() + str(RunFolder(run_folder).read_run_json()["run_id"])
    except FileNotFoundError:
        return True
    except (OSError, UserError):  # it may be readable again later
        return False


def _is_private(path: Path) -> bool:
    """Is it a folder of this user that nobody else can access? A link is not: it could lead anywhere."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == _user_id() and not found.st_mode & 0o077


def _run_folder(path: Path) -> Path | None:
    try:
        return Path(os.fsdecode(durable_files.read_start(path / _RUN, _MAX_PATH_BYTES)))
    except OSError:
        return None


def _try_lock(path: Path) -> TextIO | None:
    """Lock a folder until the returned file is closed or this process ends; None if another process holds the lock."""
    lock = os.fdopen(os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
    return lock


def _prefix() -> str:
    return f"lockstep-{_user_id()}-"


def _user_id() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0
