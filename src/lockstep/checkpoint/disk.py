"""The few things that a save does to the disk. A kill or a power cut comes between two of them, never into one.

Everything is private to the user: weights may be worth something, and what they were trained on may be in them.
"""

import errno
import hashlib
import os
import shutil
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lockstep.events.whole_files import flush as flush  # one of the few things

_PIECE_BYTES = 4 * 2**20
_HASHING_THREADS = 4  # more do not help: then memory or the disk is the limit


def make_folder(path: Path) -> None:
    """A new one, private to the user; its parent must be there."""
    path.mkdir(mode=0o700)


def write_file(path: Path, data: bytes) -> None:
    """A new file with this content, brought to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """The same where there may be one already: a reader finds the old content or the new one."""
    draft = path.with_name(f".{path.name}.draft")
    with suppress(FileNotFoundError):
        draft.unlink()  # a killed process left it
    write_file(draft, data)
    rename(draft, path)


def rename(source: Path, target: Path) -> None:
    """Also to the disk: a rename that is only in memory is undone by a power cut."""
    source.replace(target)
    flush(target.parent)


def remove_folder(path: Path) -> None:
    """What is left of it after a kill or a power cut has a name that nobody reads. A file in its place goes too."""
    if not path.name.startswith("."):
        unnamed = path.with_name(f".removed-{path.name}-{os.getpid()}")
        remove_folder(unnamed)  # an earlier try may not have come to its end
        rename(path, unnamed)
        path = unnamed
    with suppress(OSError):  # it is in nobody's way
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def read_start(path: Path, max_bytes: int) -> bytes:
    """So many bytes of a file, or all of it if it is smaller."""
    with os.fdopen(_open_regular(path), "rb") as file:
        return file.read(max_bytes)


def content_hash(path: Path, max_threads: int = _HASHING_THREADS) -> str:
    """The sha256, in hex, of the sha256s of a file's pieces of 4 MiB: so that several threads can share the work.

    With one, it is the caller's own.
    """
    descriptor = _open_regular(path)
    try:
        starts = range(0, os.fstat(descriptor).st_size, _PIECE_BYTES)
        num_threads = min(max_threads, os.cpu_count() or 1, len(starts) or 1)
        pieces = [b""] * len(starts)

        def work(first: int) -> None:  # every so many-th piece: a task for each would take memory by the file's size
            for index in range(first, len(starts), num_threads):
                pieces[index] = hashlib.sha256(os.pread(descriptor, _PIECE_BYTES, starts[index])).digest()

        if num_threads == 1:
            work(0)
        else:
            with ThreadPoolExecutor(num_threads) as threads:
                list(threads.map(work, range(num_threads)))
        return hashlib.sha256(b"".join(pieces)).hexdigest()
    finally:
        os.close(descriptor)


def _open_regular(path: Path) -> int:
    """A link may name anything, and a pipe would be waited for: such are errors."""
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
