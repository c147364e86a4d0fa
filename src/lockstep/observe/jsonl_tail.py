"""Follow a growing JSON-lines file: each read returns the lines added since the last.

Nothing in the file is trusted.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.config.regular_files import open_to_read
from lockstep.events.jsonl import parse_json

_MAX_LINE_BYTES = 2**20


class JsonlTail:
    """Yields complete JSON objects: an unfinished line is left for later, invalid and overlong ones are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._is_in_overlong = False

    def read_new(self) -> Iterator[dict[str, Any]]:
        """Yield the objects added since the last call; nothing if the file does not exist."""
        with open_regular_file(self.path) as file:
            if file is None:
                return
            status = os.fstat(file.fileno())
            self._identity = status.st_dev, status.st_ino
            file.seek(self._offset)
            while line := file.readline(_MAX_LINE_BYTES):
                is_whole = line.endswith(b"\n")
                if not is_whole and len(line) < _MAX_LINE_BYTES:
                    return  # cut off by a kill, or still being written
                self._offset += len(line)
                is_rest, self._is_in_overlong = self._is_in_overlong, not is_whole
                if is_whole and not is_rest:
                    yield from _parse_object(line)

    def is_replaced(self) -> bool:
        """Is there now another file, or a shorter one? Then everything read so far is invalid."""
        if self._identity is None:
            return False
        try:
            status = self.path.lstat()
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset


@contextmanager
def open_regular_file(path: Path) -> Iterator[BinaryIO | None]:
    """Open a regular file for reading, or yield None if there is none; neither links nor pipes are opened."""
    try:
        opened = open_to_read(path)
    except OSError:
        yield None
        return
    with opened as file:
        yield file


def read_bounded(path: Path, max_bytes: int) -> bytes | None:
    """Return at most the first `max_bytes` of a regular file; None if it cannot be read."""
    with open_regular_file(path) as file:
        try:
            return None if file is None else file.read(max_bytes)
        except OSError:
            return None


def _parse_object(line: bytes) -> Iterator[dict[str, Any]]:
    try:
        value = parse_json(line)
    except ValueError:
        return
    if isinstance(value, dict):
        yield value
