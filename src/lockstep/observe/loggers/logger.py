"""The sink in front of every backend: from events to what the backend shows."""

from pathlib import Path
from typing import Protocol

from lockstep.events.event import Event
from lockstep.events.run_folder import RunFolder
from lockstep.observe.loggers.shown import Shown, shown


class Backend(Protocol):
    """A place that shows numbers, images and text over the steps of a run."""

    def open(self, start: Event, config: str) -> None:
        """Begin, or come back to, the run. `config`: its settings as YAML, private values as references."""
        ...

    def show(self, shown: Shown) -> None: ...

    def close(self, *, failed: bool) -> None:
        """Bring everything out, and leave nothing running. Also after `open` has failed."""
        ...


class Logger:
    """Opens its backend at the start event and not before: until then the folder is not the run's to write to."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self._backend = backend
        self._folder = RunFolder(folder)
        self._is_open = False
        self._has_ended = False

    def emit(self, event: Event) -> None:
        if event["kind"] == "start" and not self._is_open:
            self._is_open, self._has_ended = True, False
            self._backend.open(event, self._folder.config.read_text())
        self._has_ended |= event["kind"] == "end"
        self._backend.show(shown(event, self._folder.path))

    def close(self) -> None:
        """A run that is closed without having come to its end has failed."""
        if self._is_open:
            self._is_open = False
            self._backend.close(failed=not self._has_ended)
