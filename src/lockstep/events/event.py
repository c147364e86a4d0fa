"""Events: what happened in a run, as plain values that any number of sinks take in."""

import math
import time
from collections.abc import Sequence
from typing import Any, Literal, Protocol

Kind = Literal["start", "step", "eval", "checkpoint", "restart", "incident", "end"]
Event = dict[str, Any]  # {"t", "attempt", "step", "kind", …}: what one line of events.jsonl holds


class Sink(Protocol):
    """Takes events in: the run folder's file, the terminal, a logger."""

    def emit(self, event: Event) -> None: ...

    def close(self) -> None: ...


class Events:
    """Tells every sink. Ranks other than 0 have no sinks, so the same code runs there and stays silent."""

    def __init__(self, sinks: Sequence[Sink] = (), attempt: int = 1) -> None:
        self.attempt = attempt
        self._sinks = tuple(sinks)

    def emit(self, kind: Kind, step: int, **fields: Any) -> None:
        event = {"t": round(time.time(), 3), "attempt": self.attempt, "step": step, "kind": kind, **plain(fields)}
        for sink in self._sinks:
            sink.emit(event)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()


def plain(value: Any) -> Any:
    """JSON has no NaN: a strict reader would refuse the line, so non-finite numbers become their names."""
    if isinstance(value, dict):
        return {key: plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [plain(element) for element in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
