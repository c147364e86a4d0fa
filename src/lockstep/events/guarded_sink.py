"""A sink whose failure does not end the training: it is switched off."""

import logging

from lockstep.errors import UserError
from lockstep.events.event_log import Event, Sink

logger = logging.getLogger("lockstep")


class GuardedSink:
    """Passes events on until the sink raises; then disables the sink with one warning, and training continues.

    A UserError passes through: it means that training must not continue.
    """

    def __init__(self, sink: Sink, name: str) -> None:
        self._sink: Sink | None = sink
        self._name = name

    def emit(self, event: Event) -> None:
        """Pass an event on, unless the sink has failed."""
        if self._sink is None:
            return
        try:
            self._sink.emit(event)
        except UserError:
            raise
        except Exception as error:
            self._warn(f"is switched off at step {event['step']}, training continues", error)
            failed, self._sink = self._sink, None
            self._close(failed)

    def close(self) -> None:
        """Close the sink, unless it has failed."""
        if self._sink is not None:
            self._close(self._sink)

    def _close(self, sink: Sink) -> None:
        try:
            sink.close()
        except Exception as error:
            if self._sink is not None:  # otherwise it has already failed with a warning
                self._warn("did not close cleanly", error)

    def _warn(self, problem: str, error: Exception) -> None:
        reason = " ".join(str(error).split())
        logger.warning("%s %s: %s", self._name, problem, f"{type(error).__name__}: {reason}" if reason else repr(error))
