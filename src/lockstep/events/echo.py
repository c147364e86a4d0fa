"""The plainest way to show a run: one line an event on standard output. For loops of one's own."""

import sys
import textwrap

from lockstep.events.event import Event

_WIDEST = 200  # characters of a value: a logged text may be a page


class Echo:
    def emit(self, event: Event) -> None:
        shown = [
            f"{name} {_short(value)}" for name, value in event.items() if name not in ("t", "attempt", "step", "kind")
        ]
        # One write, so that the lines of several processes do not run into each other.
        sys.stdout.write(f"{event['kind']} {event['step']}: {', '.join(shown)}\n")
        sys.stdout.flush()

    def close(self) -> None:
        pass


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        return " ".join(f"{name} {_short(element)}" for name, element in value.items())
    return textwrap.shorten(str(value), _WIDEST, placeholder=" …")
