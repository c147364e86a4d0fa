"""A run's folder in shared memory: where its snapshots lie, and what kills have left there is cleared away.

MEMORY/lockstep-UID-RUN_ID/.lock      held by rank 0 while it trains
                           .run       names the run folder
                           step-N/    as in a run's checkpoints

Anybody may write to /dev/shm. So a folder is used only if it is the user's own and closed to all others.
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

from lockstep.checkpoint import disk
from lockstep.errors import UserError
from lockstep.events.run_folder import RunFolder

_RUN_ID = re.compile(r"[0-9a-f]{16,64}")
_MAX_AGE_S = 24 * 3600.0  # of what nobody came back to
_MAX_PATH_BYTES = 4096
_PATIENCE_S = 1.0  # another run that sweeps holds the lock for a moment
_PAUSE_S = 0.02
_LOCK, _RUN = ".lock", ".run"


class Unusable(Exception):
    """Why there can be no folder in memory, in words for the user."""


@dataclass(frozen=True)
class MemoryFolder:
    path: Path
    lock: TextIO

    def release(self) -> None:
        self.lock.close()

    def remove(self) -> None:
        """With all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.release()


def path_in(memory: Path, run_id: str) -> Path:
    if not _RUN_ID.fullmatch(run_id):
        raise Unusable(f"the run's id, {run_id[:40]!r}, is not one that lockstep gives")
    return memory / f"{_prefix()}{run_id}"


def claim(path: Path, run_folder: Path) -> MemoryFolder:
    """The run's folder, new or as an earlier attempt has left it; of a run in another place, without its content."""
    try:
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        if not _is_ours(path):
            raise Unusable(f"{path} is not a folder that you alone may use")
        deadline = time.monotonic() + _PATIENCE_S
        while (lock := _locked(path)) is None and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        if lock is None:
            raise Unusable(f"{path} is in use by another process")
        try:
            if _run_folder(path) != run_folder.resolve():
                for entry in path.iterdir():
                    if entry.name != _LOCK:
                        disk.remove_folder(entry)
                disk.replace_file(path / _RUN, os.fsencode(run_folder.resolve()))
        except BaseException:
            lock.close()
            raise
        return MemoryFolder(path, lock)
    except OSError as error:
        raise Unusable(f"{path}: {error.strerror or error}") from None


def sweep(memory: Path, spare: Path) -> None:
    """Clear away what this user's runs have left that will not come back: too old, or without a run folder.

    `spare`: our own run's. It has come back; and to look at its lock would be to let go of it.
    """
    for path in _folders(memory):
        with suppress(OSError):
            lock = _locked(path) if path != spare and _is_ours(path) else None
            if lock is None:
                continue
            with lock:
                if _is_abandoned(path):
                    shutil.rmtree(path, ignore_errors=True)


def _folders(memory: Path) -> Iterator[Path]:
    with suppress(OSError):
        for path in list(memory.iterdir()):
            if path.name.startswith(_prefix()) and _RUN_ID.fullmatch(path.name.removeprefix(_prefix())):
                yield path


def _is_abandoned(path: Path) -> bool:
    if time.time() - path.stat().st_mtime > _MAX_AGE_S:
        return True
    run_folder = _run_folder(path)
    if run_folder is None:  # it is being made
        return False
    try:
        return path.name != _prefix() + str(RunFolder(run_folder).read_facts()["run_id"])
    except FileNotFoundError:
        return True
    except (OSError, UserError):  # perhaps it can be read again tomorrow
        return False


def _is_ours(path: Path) -> bool:
    """Not a link either: that could lead anywhere."""
    found = os.lstat(path)
    return stat.S_ISDIR(found.st_mode) and found.st_uid == _user() and not found.st_mode & 0o077


def _run_folder(path: Path) -> Path | None:
    try:
        return Path(os.fsdecode(disk.read_start(path / _RUN, _MAX_PATH_BYTES)))
    except OSError:
        return None


def _locked(path: Path) -> TextIO | None:
    """Its lock, which ends with this process; None if another has it."""
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
    return f"lockstep-{_user()}-"


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0
