"""Poll a run folder until the run has finished, failed or been stopped."""

import os
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import EXIT_FAILED, EXIT_STOPPED
from lockstep.observe.run_record import RunReader, RunRecord
from lockstep.observe.run_status import RunStatus, read_run_lock, run_status


class RunView(NamedTuple):
    """A run as it was when it was polled."""

    record: RunRecord
    status: RunStatus


class RunFollower:
    """Reads a run folder repeatedly, and decides when there is nothing left to wait for.

    Args:
        path: the run folder, which need not exist yet.
        patience_s: how long to wait for a stopped run to start again; a restart takes a while.
    """

    def __init__(self, path: Path, patience_s: float) -> None:
        self._path = path
        self._patience_s = patience_s
        self._reader = RunReader(path)
        self._stopped_since_s: float | None = None

    def poll(self) -> RunView:
        """Read what is new in the folder."""
        if not self._path.exists():
            return RunView(RunRecord(self._path), RunStatus("waiting", f"waiting for {self._path}"))
        record = self._reader.read()
        return RunView(record, run_status(record, read_run_lock(self._path)))

    def exit_code(self, view: RunView, now_s: float) -> int | None:
        """Return the exit code of `lockstep watch`; None while there is something to wait for.

        Args:
            view: the run, as just polled.
            now_s: the time of a monotonic clock.
        """
        if view.status.state == "ended":
            return 0
        if view.status.state != "left":
            self._stopped_since_s = None
            return None
        self._stopped_since_s = now_s if self._stopped_since_s is None else self._stopped_since_s
        if now_s - self._stopped_since_s < self._patience_s:
            return None
        record = view.record
        has_failed = any(incident.t > (record.last_t or 0.0) for incident in record.incidents)
        return EXIT_FAILED if has_failed else EXIT_STOPPED

    def signature(self) -> tuple[int, ...]:
        """Return a value that changes when there is something new to read."""
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
