"""The folder in memory in which an agent and its ranks leave each other word, for as long as the agent lives."""

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.config import environment
from lockstep.supervision.rank_files import FOLDER_PREFIX

_LOCK = ".lock"
_ROOM_BYTES = 16 * 2**20  # for reports and stacks; the rest is pages of some kilobytes
_BEING_MADE_S = 60.0  # without a lock yet


@contextmanager
def agent_folder() -> Iterator[Path]:
    """In memory, because pages that are written all the time should not lie on a disk; else among temporary files."""
    memory = environment.memory_folder()
    if memory is not None:
        sweep(memory)
    if memory is None or not _has_room(memory):
        memory = Path(tempfile.gettempdir())
        sweep(memory)
    with (
        tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=memory) as folder,
        (Path(folder) / _LOCK).open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(folder)


def _has_room(memory: Path) -> bool:
    found = os.statvfs(memory)
    return found.f_bavail * found.f_frsize >= _ROOM_BYTES


def clear(folder: Path) -> None:
    """Of what an attempt's ranks have left."""
    for path in folder.iterdir():
        if path.name != _LOCK:
            path.unlink()


def sweep(memory: Path) -> None:
    """Remove what this user's agents have left that were killed: nobody holds its lock."""
    for folder in memory.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and time.time() - found.st_mtime > _BEING_MADE_S:
                _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    with os.fdopen(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(folder)
