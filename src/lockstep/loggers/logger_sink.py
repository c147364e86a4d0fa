"""The sink in front of a logger backend: turns events into values."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lockstep.config.regular_files import open_to_read
from lockstep.events.event_log import Event
from lockstep.events.run_folder import RunFolder
from lockstep.terminal_text import escape_controls

_ENVELOPE = ("t", "attempt", "step", "kind")
_SCALAR_GROUPS = {"step": "train", "eval": "eval"}  # kinds whose numbers become curves; other kinds become text
_NON_FINITE = ("nan", "inf", "-inf")  # as spelled in events


class LoggedValues(NamedTuple):
    """The values of one event that backends show, by name."""

    step: int
    t: float
    scalars: dict[str, float]
    images: dict[str, Path]
    texts: dict[str, str]


class LoggerBackend(Protocol):
    """A service or file format that shows scalars, images and text over the steps of a run."""

    def open(self, start: Event, config: str) -> None:
        """Begin to log a run, or continue after a resume. `config`: its settings as YAML, secrets as references."""
        ...

    def show(self, values: LoggedValues) -> None:
        """Write the values of one event."""
        ...

    def close(self, *, failed: bool) -> None:
        """Flush everything and leave nothing running. Also called after `open` has raised."""
        ...


class LoggerSink:
    """Passes a run's events to a backend, which it opens at the start event: only then does the run own its folder."""

    def __init__(self, backend: LoggerBackend, folder: Path) -> None:
        self._backend = backend
        self._folder = RunFolder(folder)
        self._is_open = False
        self._has_ended = False

    def emit(self, event: Event) -> None:
        """Show an event."""
        if event["kind"] == "start" and not self._is_open:
            self._is_open, self._has_ended = True, False
            with open_to_read(self._folder.config) as file:
                self._backend.open(event, file.read().decode())
        self._has_ended |= event["kind"] == "end"
        self._backend.show(logged_values(event, self._folder.path))

    def close(self) -> None:
        """Close the backend. A run that is closed without an end event counts as failed."""
        if self._is_open:
            self._is_open = False
            self._backend.close(failed=not self._has_ended)


def logged_values(event: Event, folder: Path) -> LoggedValues:
    """Name what an event shows: `train/loss`, `eval/accuracy`, `images/NAME`, `texts/NAME`, `run/checkpoint` …

    Args:
        event: the event as a sink receives it.
        folder: the run folder, which image paths are relative to.
    """
    kind, fields = event["kind"], event_fields(event)
    images, texts = fields.pop("images", {}), fields.pop("texts", {})
    group = _SCALAR_GROUPS.get(kind)
    if group == "eval":
        fields |= fields.pop("metrics", {})
    shown_texts = {f"texts/{name}": escape_controls(text) for name, text in texts.items()}
    if group is None:
        shown_texts[f"run/{kind}"] = "\n".join(_text_lines(fields))
    return LoggedValues(
        event["step"],
        event["t"],
        scalars={} if group is None else dict(_scalars(fields, group)),
        images={f"images/{name}": folder / path for name, path in images.items()},
        texts=shown_texts,
    )


def event_fields(event: Event) -> dict[str, Any]:
    """Return an event without its time, attempt, step and kind."""
    return {name: value for name, value in event.items() if name not in _ENVELOPE}


def _scalars(fields: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers in nested fields by their path. Lists are not curves."""
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _scalars(value, f"{prefix}/{name}")
        elif isinstance(value, int | float) or value in _NON_FINITE:
            yield escape_controls(f"{prefix}/{name}"), float(value)


def _text_lines(fields: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _text_lines(value, f"{prefix}{name}/")
        else:
            yield escape_controls(f"{prefix}{name}: {value}")
