"""Append-only files of one JSON object a line, and how to read them while they grow."""

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.json_text import parse_json
from lockstep.errors import UserError
from lockstep.events.event import Event

logger = logging.getLogger("lockstep")

_MAX_LINE_BYTES = 2**20


class Mark(NamedTuple):
    """How a file began: the sha256, in hex, of its first bytes."""

    size: int
    sha256: str


class JsonLines:
    """A sink that appends. One write call a line, so that a kill leaves at most the last line torn.

    A disk that is full or gone costs lines, not the run: that is said once, and every further line is tried again.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_torn = False
        self._is_failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            self._size = path.stat().st_size
            self._hash = _sha256(path, self._size)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        if self._size and not ends_with_newline(path):
            self._append(b"\n")  # a kill tore the last line: keep ours apart from it

    def emit(self, event: Event) -> None:
        line = json.dumps(event, allow_nan=False).encode() + b"\n"
        try:
            self._append(b"\n" + line if self._is_torn else line)
            self._is_torn = self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.warning("%s: lines are being lost: %s", self._path, error.strerror or error)
            self._is_failing = True

    def mark(self) -> Mark:
        return Mark(self._size, self._hash.hexdigest())

    def close(self) -> None:
        self._file.close()

    def _append(self, data: bytes) -> None:
        written = self._file.write(data) or 0
        self._hash.update(data[:written])
        self._size += written
        if written < len(data):
            self._is_torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_lines(path: Path, max_bytes: int = _MAX_LINE_BYTES) -> Iterator[dict[str, Any]]:
    """The whole objects of a file; torn, foreign and overlong lines, of more than `max_bytes`, are passed over."""
    with path.open("rb") as file:
        while line := file.readline(max_bytes):
            whole = line.endswith(b"\n")
            while line and not line.endswith(b"\n"):
                line = file.readline(max_bytes)  # the rest of an overlong line is not a line of its own
            try:
                value = parse_json(line) if whole else None
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def newest_attempts(events: Iterable[Event]) -> list[Event]:
    """After a kill steps repeat: keep, for each (kind, step), all that the highest attempt said, in order of step."""
    newest: dict[tuple[str, int], Event] = {}
    for event in events:
        key = (event["kind"], event["step"])
        known = newest.get(key)
        if known is None or event["attempt"] > known["attempt"]:
            newest[key] = event
        elif event["attempt"] == known["attempt"]:  # a step may say its loss, then an image, then a text
            newest[key] = _together(known, event)
    return sorted(newest.values(), key=lambda event: (event["step"], event["t"]))


def _together(earlier: Event, later: Event) -> Event:
    """What both said; where they differ, the later. The images of two events are all of a step's images."""
    inner = {
        name: {**earlier[name], **value}
        for name, value in later.items()
        if isinstance(value, dict) and isinstance(earlier.get(name), dict)
    }
    return {**earlier, **later, **inner}


def _sha256(path: Path, size: int) -> "hashlib._Hash":
    """Of a file's first bytes."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while size > 0 and (data := file.read(min(size, _MAX_LINE_BYTES))):
            sha256.update(data)
            size -= len(data)
    return sha256


def ends_with_newline(path: Path) -> bool:
    """Else a kill tore its last line. The file must not be empty."""
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) == b"\n"
