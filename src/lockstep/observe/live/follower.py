"""A run that is looked at again and again: there or not yet, going on, at its end, or left."""

import os
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import EXIT_FAILED, EXIT_STOPPED
from lockstep.observe.presence import presence
from lockstep.observe.record import Record, RunReader
from lockstep.observe.state import State, state_of


class View(NamedTuple):
    record: Record
    state: State


class Follower:
    """`patience_s`: for so long nobody may be training in a run that is not at its end; a restart takes a while."""

    def __init__(self, path: Path, patience_s: float) -> None:
        self._path = path
        self._patience_s = patience_s
        self._reader = RunReader(path)
        self._left_since: float | None = None

    def look(self) -> View:
        if not self._path.exists():
            return View(Record(self._path), State("waiting", f"waiting for {self._path}"))
        record = self._reader.read()
        return View(record, state_of(record, presence(self._path)))

    def exit_code(self, view: View, now_s: float) -> int | None:
        """None, while there is something to wait for. `now_s`: of a clock that only goes forward."""
        if view.state.standing == "ended":
            return 0
        if view.state.standing != "left":
            self._left_since = None
            return None
        self._left_since = now_s if self._left_since is None else self._left_since
        if now_s - self._left_since < self._patience_s:
            return None
        record = view.record
        has_failed = any(incident.t > (record.last_t or 0.0) for incident in record.incidents)
        return EXIT_FAILED if has_failed else EXIT_STOPPED

    def signature(self) -> tuple[int, ...]:
        """Another one, when there is something new to be read."""
        names = ("events.jsonl", "config.yaml", "incidents", "media", "pictures")
        paths = [*(self._path / name for name in names), *(self._path / "ranks").glob("*.jsonl")]
        sizes = []
        for path in paths:
            try:
                status = os.lstat(path)
            except OSError:
                continue
            sizes += [status.st_size, status.st_mtime_ns]
        return tuple(sizes)
