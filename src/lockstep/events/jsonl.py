"""JSON Lines files: appended one whole line at a time, and readable while they grow."""

import errno
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from lockstep.config.regular_files import open_to_append, open_to_read
from lockstep.errors import UserError
from lockstep.events.event_log import Event

logger = logging.getLogger("lockstep")

_MAX_LINE_BYTES = 2**20


class FileMark(NamedTuple):
    """The size of a file at some time, and the sha256, in hex, of its bytes up to there."""

    size: int
    sha256: str


class JsonlWriter:
    """A sink that appends to a file, with a single write per line, so that a kill tears at most the last line.

    If the disk is full or gone, lines are lost but the run continues: it warns once, and tries to write each new line.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_torn = False
        self._is_failing = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_to_append(path)
            self._size = self._file.seek(0, os.SEEK_END)
            self._hash = _sha256(self._file, self._size)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        if self._size and not ends_with_newline(self._file):
            self._append(b"\n")  # a kill tore the last line: start a new one

    def emit(self, event: Event) -> None:
        """Append one line."""
        line = json.dumps(event, allow_nan=False).encode() + b"\n"
        try:
            self._append(b"\n" + line if self._is_torn else line)
            self._is_torn = self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                logger.warning("%s: lines are being lost: %s", self._path, error.strerror or error)
            self._is_failing = True

    def mark(self) -> FileMark:
        """The file's size and hash now."""
        return FileMark(self._size, self._hash.hexdigest())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, data: bytes) -> None:
        written = self._file.write(data) or 0
        self._hash.update(data[:written])
        self._size += written
        if written < len(data):
            self._is_torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def parse_json(data: bytes | str) -> Any:
    """`json.loads` for untrusted data: nesting too deep for the parser is a ValueError too, like any other bad text."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_number(value: Any) -> float | None:
    """Return a number as events hold it, where `"nan"` and `"inf"` are strings; None for anything else."""
    if value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return None


def parse_count(value: Any) -> int | None:
    """Return a non-negative integer of 63 bits; None for anything else."""
    return value if type(value) is int and 0 <= value < 2**63 else None


def parse_attempt(value: Any) -> int | None:
    """Return the number of an attempt; None for anything else. No run has as many attempts as 32 bits can count."""
    return value if type(value) is int and 0 <= value < 2**32 else None


def read_jsonl(path: Path, max_bytes: int = _MAX_LINE_BYTES, *, follow_links: bool = False) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file, one per line; skips torn lines, other JSON, and lines longer than `max_bytes`."""
    with open_to_read(path, follow_links=follow_links) as file:
        while line := file.readline(max_bytes):
            is_whole = line.endswith(b"\n")
            while line and not line.endswith(b"\n"):
                line = file.readline(max_bytes)  # the rest of an overlong line is not a line by itself
            try:
                value = parse_json(line) if is_whole else None
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def newest_attempts(events: Iterable[Event]) -> list[Event]:
    """The events in order of step, without those of steps that a later attempt repeated after a kill.

    For each (kind, step) the events of the highest attempt are merged into one.
    """
    newest: dict[tuple[str, int], Event] = {}
    for event in events:
        key = (event["kind"], event["step"])
        known = newest.get(key)
        if known is None or event["attempt"] > known["attempt"]:
            newest[key] = event
        elif event["attempt"] == known["attempt"]:  # a step may log its loss, then an image, then a text
            newest[key] = _merged(known, event)
    return sorted(newest.values(), key=lambda event: (event["step"], event["t"]))


def _merged(earlier: Event, later: Event) -> Event:
    """The fields of both, the later winning; fields that are dicts in both, such as images, are merged too."""
    inner = {
        name: {**earlier[name], **value}
        for name, value in later.items()
        if isinstance(value, dict) and isinstance(earlier.get(name), dict)
    }
    return {**earlier, **later, **inner}


def _sha256(file: IO[bytes], size: int) -> "hashlib._Hash":
    """The hash of a file's first `size` bytes."""
    sha256 = hashlib.sha256()
    file.seek(0)
    while size > 0 and (data := file.read(min(size, _MAX_LINE_BYTES))):
        sha256.update(data)
        size -= len(data)
    return sha256


def ends_with_newline(file: IO[bytes]) -> bool:
    """Is the last line whole? If not, a kill tore it. The file must not be empty."""
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
