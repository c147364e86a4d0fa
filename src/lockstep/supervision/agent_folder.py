"""The folder in shared memory through which an agent and its ranks exchange files."""

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lockstep.config import environment

FOLDER_PREFIX = "lockstep-agent-"

_LOCK = ".lock"
_MIN_FREE_BYTES = 16 * 2**20  # for reports and stacks; heartbeat pages take a few kilobytes
_MAX_SOCKET_FOLDER_BYTES = 56  # of the 107 that a socket's path may have; W&B's need the most of the rest
_GRACE_FOR_NEW_S = 60.0  # a folder this young may belong to an agent that has not locked it yet


@dataclass(frozen=True)
class RankFiles:
    """The files of one rank in its agent's folder."""

    folder: Path
    rank: int

    @classmethod
    def own(cls) -> Self | None:
        """Return the files of this process, or None if no agent started it."""
        folder = environment.supervision_folder()
        return None if folder is None else cls(folder, environment.read_placement().rank)

    @property
    def heartbeat(self) -> Path:
        """The rank's heartbeat page: its step, its phase and since when; see `supervision.heartbeat`."""
        return self._path("heartbeat")

    @property
    def report(self) -> Path:
        """The error that made the rank fail, written by the rank itself."""
        return self._path("json")

    @property
    def end(self) -> Path:
        """The exit code of a rank whose script is over but whose process has not ended yet."""
        return self._path("end")

    @property
    def stacks(self) -> Path:
        """The Python stacks of its threads, written on request."""
        return self._path("stacks")

    @property
    def requests(self) -> Path:
        """A named pipe on which the agent asks for the last collectives; see `supervision.flight_recorder`."""
        return self._path("requests")

    @property
    def collectives(self) -> Path:
        """Its last collectives, written on request."""
        return self._path("collectives")

    @property
    def run_folder(self) -> Path:
        """The path of the run folder that the rank opened, if any."""
        return self._path("run")

    @property
    def sockets(self) -> Path:
        """A folder for the sockets of data workers and loggers, which nobody removes if the rank is killed."""
        return self._path("sock")

    def _path(self, suffix: str) -> Path:
        return self.folder / f"rank-{self.rank}.{suffix}"


def make_socket_folder(files: RankFiles) -> Path | None:
    """Create the rank's folder for sockets; return None if its path is too long for sockets in it."""
    if len(os.fsencode(files.sockets)) > _MAX_SOCKET_FOLDER_BYTES:
        return None
    files.sockets.mkdir(mode=0o700)
    return files.sockets


@contextmanager
def agent_folder() -> Iterator[Path]:
    """Create a folder for an agent, private to this user, and remove it at the end.

    It is in shared memory, because heartbeat pages are written constantly and should not touch a disk. If there is not
    enough shared memory, it is created in the temporary folder instead.
    """
    import fcntl  # does not exist on Windows, where other parts of this module are imported

    memory = environment.shared_memory_root()
    if memory is not None:
        remove_stale_agent_folders(memory)
    if memory is None or not _has_room(memory):
        memory = Path(tempfile.gettempdir())
        remove_stale_agent_folders(memory)
    with (
        tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX, dir=memory) as folder,
        (Path(folder) / _LOCK).open("w") as lock,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(folder)


def clear_rank_files(folder: Path) -> None:
    """Remove the files that the ranks of an earlier attempt wrote."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


def remove_stale_agent_folders(memory: Path) -> None:
    """Remove the folders of this user's agents that were killed: those whose lock nobody holds."""
    for folder in memory.glob(f"{FOLDER_PREFIX}*"):
        with suppress(OSError):
            found = folder.lstat()
            is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
            if is_ours and time.time() - found.st_mtime > _GRACE_FOR_NEW_S:
                _remove_if_unlocked(folder)


def _has_room(memory: Path) -> bool:
    found = os.statvfs(memory)
    return found.f_bavail * found.f_frsize >= _MIN_FREE_BYTES


def _remove_if_unlocked(folder: Path) -> None:
    import fcntl

    with os.fdopen(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        shutil.rmtree(folder)
