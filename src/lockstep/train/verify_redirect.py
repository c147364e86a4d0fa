"""Where a run writes: into the script's folder or, under `lockstep verify`, into a folder of the verification.

`lockstep verify script.py` compares the runs that a script makes on several numbers of processes. They must not touch
the script's own run folder; they are traced, and stop after some steps.
"""

import re
from pathlib import Path
from typing import NamedTuple

from lockstep.config import environment
from lockstep.events.run_folder import RunFolder
from lockstep.supervision.step_recorder import replace_recorder_by_run


class RunPlace(NamedTuple):
    """Where a run writes, and when it stops."""

    folder: Path | None
    trace: Path | None
    stop_after: int | None = None  # updates


def run_place(folder: str | Path | None, *, trace: bool) -> RunPlace:
    """Return where a run writes, and when it stops, if the script gives it this folder."""
    own = None if folder is None else Path(folder)
    request = environment.read_verify_request()
    if request is None or request.runs is None:
        return RunPlace(own, RunFolder(own).trace if trace and own is not None else None)
    earlier = replace_recorder_by_run(own)
    if own is not None:
        redirected = request.runs / flat_name(own)
        return RunPlace(redirected, RunFolder(redirected).trace, request.steps)
    if any(each is not None for each in earlier):  # a part of that run, as a search's network is
        return RunPlace(None, None)
    return RunPlace(None, request.folder / f"run-{1 + len(earlier)}.jsonl", request.steps)


def flat_name(folder: Path) -> str:
    """Return a folder's path as a single name, the same each time."""
    return re.sub(r"[^\w.-]+", "_", str(folder)).strip("_.") or "run"
