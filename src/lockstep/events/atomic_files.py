"""Atomic file writes: a reader finds the whole file or none, and a power cut does not undo it."""

import os
from contextlib import suppress
from pathlib import Path

from lockstep.config.regular_files import open_new


def write_atomic(path: Path, data: str | bytes, *, to_disk: bool = False) -> None:
    """Write a file under another name, then rename it, so that no reader sees half of it.

    Args:
        path: the file; an existing one is replaced.
        data: its whole content; text is written as UTF-8.
        to_disk: also flush it to the disk, so that it survives a power cut.
    """
    draft = path.with_name(f".{path.name}.draft")
    with suppress(FileNotFoundError):
        draft.unlink()  # left behind by a killed process, or a link: [Note: links]
    with open_new(draft) as file:
        file.write(data.encode() if isinstance(data, str) else data)
    if to_disk:
        flush(draft)
    draft.replace(path)
    if to_disk:
        flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
