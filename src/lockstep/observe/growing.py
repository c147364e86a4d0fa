"""A JSON-lines file that somebody may still be writing: each look at it takes in what has come since the one before."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from lockstep.config.json_text import parse_json

_MAX_LINE_BYTES = 2**20


class GrowingLines:
    """Whole objects only: a line without its end is left for later, foreign and overlong ones are passed over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._identity: tuple[int, int] | None = None
        self._is_in_overlong = False

    def new(self) -> Iterator[dict[str, Any]]:
        """Those that were not there before; none, where there is no such file."""
        with opened(self.path) as file:
            if file is None:
                return
            status = os.fstat(file.fileno())
            self._identity = status.st_dev, status.st_ino
            file.seek(self._offset)
            while line := file.readline(_MAX_LINE_BYTES):
                is_whole = line.endswith(b"\n")
                if not is_whole and len(line) < _MAX_LINE_BYTES:
                    return  # torn by a kill, or not yet written to its end
                self._offset += len(line)
                is_rest, self._is_in_overlong = self._is_in_overlong, not is_whole
                if is_whole and not is_rest:
                    yield from _object_in(line)

    def is_replaced(self) -> bool:
        """Is another file there now, or a shorter one? Then all that was read is void."""
        if self._identity is None:
            return False
        try:
            status = self.path.lstat()
        except OSError:
            return True
        return (status.st_dev, status.st_ino) != self._identity or status.st_size < self._offset


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO | None]:
    """A regular file, for reading; None where there is none. A link may lead anywhere, and a pipe never answers."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        yield None
        return
    with open(descriptor, "rb") as file:  # noqa: PTH123 (a descriptor has no path)
        yield file


def read_bounded(path: Path, max_bytes: int) -> bytes | None:
    """What a small file holds, or None; of a larger one, its beginning."""
    with opened(path) as file:
        try:
            return None if file is None else file.read(max_bytes)
        except OSError:
            return None


def _object_in(line: bytes) -> Iterator[dict[str, Any]]:
    try:
        value = parse_json(line)
    except ValueError:
        return
    if isinstance(value, dict):
        yield value
