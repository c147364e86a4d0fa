"""Files that a reader finds whole or not at all, and that a power cut does not take back."""

import os
from pathlib import Path


def write_whole(path: Path, text: str, *, to_disk: bool = False) -> None:
    """`to_disk`: it is still there after a power cut."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    if to_disk:
        flush(draft)
    draft.replace(path)
    if to_disk:
        flush(path.parent)


def flush(path: Path) -> None:
    """Bring a file's content or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
