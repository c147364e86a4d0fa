"""Events: what happens in a run, sent as plain dicts to sinks (events.jsonl, standard output, loggers)."""

import math
import textwrap
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from lockstep.terminal_text import print_line

EventKind = Literal["start", "step", "eval", "checkpoint", "restart", "incident", "end"]
Event = dict[str, Any]  # {"t", "attempt", "step", "kind", …}: one line of events.jsonl
RESERVED_FIELDS = ("t", "attempt", "step", "kind")

_MAX_PRINTED = 200  # characters of a value: a logged text may be a page long


class Sink(Protocol):
    """Receives events: the run folder's file, standard output, a logger."""

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...

    def close(self) -> None:
        """Flush and release what the sink holds."""
        ...


class EventLog:
    """Sends each event to every sink. Ranks other than 0 have no sinks: the same code runs there and does nothing."""

    def __init__(self, sinks: Sequence[Sink] = (), attempt: int = 1) -> None:
        self.attempt = attempt
        self._sinks = tuple(sinks)

    def emit(self, kind: EventKind, step: int, **fields: Any) -> None:
        """Send an event of this kind at this step, with the time and the attempt added."""
        event = {"t": round(time.time(), 3), "attempt": self.attempt, "step": step, "kind": kind, **json_safe(fields)}
        for sink in self._sinks:
            sink.emit(event)

    def close(self) -> None:
        """Close every sink."""
        for sink in self._sinks:
            sink.close()


class PrintSink:
    """Prints one line per event to standard output; for training loops in scripts."""

    def emit(self, event: Event) -> None:
        """Print the event."""
        shown = [f"{name} {_short(value)}" for name, value in event.items() if name not in RESERVED_FIELDS]
        print_line(f"{event['kind']} {event['step']}: {', '.join(shown)}", flush=True)

    def close(self) -> None:
        """Nothing to release."""


def json_safe(value: Any) -> Any:
    """The value with NaN and infinities replaced by their names, since strict JSON has neither."""
    if isinstance(value, dict):
        return {key: json_safe(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(element) for element in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return " ".join(f"{name} {_short(element)}" for name, element in value.items())
    return textwrap.shorten(str(value), _MAX_PRINTED, placeholder=" …")
