"""Where a run leaves what it makes: where the script says, or where somebody who looks at the script wants it.

`lockstep verify script.py` compares the runs that a script makes on several numbers of processes. They must not touch
the script's own folder, are traced, and end after some steps.
"""

import re
from pathlib import Path
from typing import NamedTuple

from lockstep.config import environment
from lockstep.events.run_folder import RunFolder
from lockstep.supervision.updates import leave_to_lockstep


class Place(NamedTuple):
    folder: Path | None
    trace: Path | None
    stop_after: int | None = None  # updates


_made: list[Path | None] = []  # the folders that the runs of this process were to have, while it is looked at


def place_of(folder: str | Path | None, *, trace: bool) -> Place:
    own = None if folder is None else Path(folder)
    observation = environment.observation()
    if observation is None or observation.runs is None:
        return Place(own, RunFolder(own).trace if trace and own is not None else None)
    leave_to_lockstep()
    earlier = list(_made)
    _made.append(own)
    if own is not None:
        elsewhere = observation.runs / observed_name(own)
        return Place(elsewhere, RunFolder(elsewhere).trace, observation.steps)
    if any(each is not None for each in earlier):  # a part of that one, as a search's network is
        return Place(None, None)
    return Place(None, observation.folder / f"run-{1 + len(earlier)}.jsonl", observation.steps)


def observed_name(folder: Path) -> str:
    """In place of a folder's path: a single name, the same each time."""
    return re.sub(r"[^\w.-]+", "_", str(folder)).strip("_.") or "run"
