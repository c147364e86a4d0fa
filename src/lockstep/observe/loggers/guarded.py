"""A sink that may fail without taking the training with it."""

import logging

from lockstep.errors import UserError
from lockstep.events.event import Event, Sink

logger = logging.getLogger("lockstep")


class Guarded:
    """Passes events on until the sink raises: then it is switched off, with one warning.

    A UserError goes through: it says that training must not go on like this.
    """

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink: Sink | None = sink
        self._name = name

    def emit(self, event: Event) -> None:
        if self._sink is None:
            return
        try:
            self._sink.emit(event)
        except UserError:
            raise
        except Exception as error:
            self._warn(f"is switched off at step {event['step']}, training goes on", error)
            failed, self._sink = self._sink, None
            self._close(failed)

    def close(self) -> None:
        if self._sink is not None:
            self._close(self._sink)

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:
            if self._sink is not None:  # else it has failed before, and that was said
                self._warn("did not close", error)

    def _warn(self, what: str, error: Exception) -> None:
        words = " ".join(str(error).split())
        logger.warning("%s %s: %s", self._name, what, f"{type(error).__name__}: {words}" if words else repr(error))
