"""How a run stands: not begun, running, at its end, or left before it."""

import time
from typing import Literal, NamedTuple

from lockstep.observe.presence import Presence
from lockstep.observe.record import Record
from lockstep.observe.wording import duration, one_line

Standing = Literal["waiting", "running", "ended", "left", "unknown"]


class State(NamedTuple):
    standing: Standing
    words: str


def state_of(record: Record, presence: Presence) -> State:
    if record.is_ended:
        stopped = f": {one_line(record.stopped)}" if record.stopped else ""
        return State("ended", f"at its end, after {_place(record)}{stopped}")
    if presence.is_here:
        return State("running", f"running, {presence.who}: {_place(record)}" if record.start else "starting")
    if not record.start:
        return State("waiting", "it has not begun")
    if presence.is_here is None:
        ago = "" if record.last_t is None else f", last heard of {duration(max(0.0, time.time() - record.last_t))} ago"
        return State("unknown", f"not at its end: {_place(record)}{ago}")
    goes_on = record.saves.newest_step
    again = "" if goes_on is None else f"; started again, it goes on from step {goes_on}"
    return State("left", f"not running, and not at its end: {_place(record)}{again}")


def _place(record: Record) -> str:
    what = "generation" if record.is_search else "step"
    of = "" if record.total_steps is None else f" of {record.total_steps:,}"
    return f"{what} {record.step:,}{of}"
