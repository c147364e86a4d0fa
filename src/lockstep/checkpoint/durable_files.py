"""The file operations of a save: a kill or a power cut comes between two of them, never into one.

What an operation has written, replaced or renamed is on disk when it returns.

Everything is created private to the user: weights are valuable, and training data can be recovered from them.
"""

import hashlib
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from lockstep.config.regular_files import open_new, open_to_read
from lockstep.events.atomic_files import (
    flush as flush,
)  # re-exported, so that all file operations of a save are in this module

_CHUNK_BYTES = 4 * 2**20
_HASHING_THREADS = 4  # with more, memory or the disk is the limit


def make_folder(path: Path) -> None:
    """Create a folder that only the user can read. Its parent must exist."""
    path.mkdir(mode=0o700)


def write_file(path: Path, data: bytes) -> None:
    """Create a file with this content and flush it to disk. An existing file is an error."""
    with open_new(path, 0o600) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, data: bytes) -> None:
    """Write a file that may exist already: readers see either the old content or the new."""
    draft = path.with_name(f".{path.name}.draft")
    with suppress(FileNotFoundError):
        draft.unlink()  # left behind by a killed process
    write_file(draft, data)
    rename(draft, path)


def rename(source: Path, target: Path) -> None:
    """Rename and flush the folder, or a power cut could undo the rename."""
    source.replace(target)
    flush(target.parent)


def remove_folder(path: Path) -> None:
    """Remove a folder, or a file in its place.

    It is renamed to a hidden name first: if a kill interrupts the removal, no reader finds the rest.
    """
    if not path.name.startswith("."):
        hidden = path.with_name(f".removed-{path.name}-{os.getpid()}")
        remove_folder(hidden)  # an earlier removal may have been interrupted
        rename(path, hidden)
        path = hidden
    with suppress(OSError):  # a leftover under a hidden name does no harm
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def read_start(path: Path, max_bytes: int) -> bytes:
    """Read at most the first `max_bytes` of a regular file."""
    with open_to_read(path) as file:
        return file.read(max_bytes)


def content_hash(path: Path, max_threads: int = _HASHING_THREADS) -> str:
    """Return the sha256, in hex, of the sha256s of a file's 4 MiB chunks, which several threads can compute.

    With `max_threads=1` all of it runs in the calling thread.
    """
    with open_to_read(path) as file:
        descriptor = file.fileno()
        starts = range(0, os.fstat(descriptor).st_size, _CHUNK_BYTES)
        num_threads = min(max_threads, os.cpu_count() or 1, len(starts) or 1)
        hashes = [b""] * len(starts)

        def hash_every_nth_chunk(first: int) -> None:  # one task per chunk would need memory in proportion to the file
            for index in range(first, len(starts), num_threads):
                hashes[index] = hashlib.sha256(os.pread(descriptor, _CHUNK_BYTES, starts[index])).digest()

        if num_threads == 1:
            hash_every_nth_chunk(0)
        else:
            with ThreadPoolExecutor(num_threads) as threads:
                list(threads.map(hash_every_nth_chunk, range(num_threads)))
        return hashlib.sha256(b"".join(hashes)).hexdigest()
