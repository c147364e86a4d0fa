"""What a person sees while training: a progress bar on a terminal, plain lines elsewhere, or JSON for programs."""

import json
import os
import sys
from collections.abc import Callable
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.events.event import Event, Sink
from lockstep.observe import search_words


def console_for(stream: TextIO = sys.stdout, *, quiet: bool = False, as_json: bool = False) -> list[Sink]:
    """The sinks that show a run on `stream`: none when quiet."""
    if as_json:
        return [JsonConsole(stream)]
    if quiet:
        return []
    return [ProgressConsole(stream)] if stream.isatty() else [PlainConsole(stream)]


class PlainConsole:
    """One line an event, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def emit(self, event: Event) -> None:
        for line in describe(event):
            _say(line, self._stream)

    def close(self) -> None:
        pass


class JsonConsole:
    """The events themselves, one JSON object a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def emit(self, event: Event) -> None:
        _say(json.dumps(event), self._stream)

    def close(self) -> None:
        pass


class ProgressConsole:
    """A live bar with the loss, or a search's best values; evaluations scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("training", total=None, loss="")

    def emit(self, event: Event) -> None:
        if event["kind"] == "step" and "loss" in event:
            self._progress.update(self._task, completed=event["step"], loss=f"loss {_number(event['loss'])}")
            return
        if event["kind"] == "step" and "generation" in event:
            best = "" if event["found"] is None else f"best {search_words.values(event['found'])}"
            self._progress.update(self._task, completed=event["step"], loss=best)
            if event["design"] is None and not event["reasons"]:
                return
        if event["kind"] == "end":
            self._progress.update(self._task, completed=event["step"])
            self._progress.stop()  # first, so that the result stands below the bar
        for line in describe(event):
            self._console.print(line, markup=False)
        if event["kind"] == "start":
            total, what = (
                (event["total_rounds"], "searching") if "total_rounds" in event else (event["total_steps"], "training")
            )
            self._progress.update(self._task, total=total, completed=event["step"], description=what)
            self._progress.start()

    def close(self) -> None:
        self._progress.stop()


def _say(text: str, stream: TextIO) -> None:
    try:
        print(text, file=stream, flush=True)
    except BrokenPipeError:
        # Whoever read our output has left (`… | head -1`): train on, unwatched.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def describe(event: Event) -> list[str]:
    """An event in words, as one or more lines."""
    words = _WORDS.get(event["kind"])
    return [f"{event['kind']} at step {event['step']}"] if words is None else words(event)


def _start(event: Event) -> list[str]:
    lines = []
    if event["backend"] is not None:
        lines.append(f"Initialized DDP with {event['processes']} processes ({event['backend']}, {event['device']})")
    if event["launcher"] not in ("none", "lockstep"):
        lines.append(f"these processes are workers, supervised by whoever started them ({event['launcher']})")
    if event.get("is_done"):
        lines.append(f"nothing is left to do: finished after step {event['step']}, as {event['resumed']} says")
    elif event["resumed"] is not None:
        lines.append(f"resumed at step {event['step']} from {event['resumed']} (attempt {event['attempt']})")
    elif event["attempt"] > 1:
        lines.append(f"attempt {event['attempt']}: no checkpoint in this folder yet, training starts at the first step")
    if "total_rounds" in event:
        return [*lines, search_words.start(event)]
    lines.append(
        f"{event['recipe']}: {event['parameters']:,} parameters on {event['device']}, "
        f"{_batch(event)}, {_rates(event)}, {event['total_steps']} steps → {event['folder']}"
    )
    if event["processes"] > 1:
        lines.append(f"parallel: {event['parallel']} ({event['why_parallel']})")
    if "recomputed" in event:
        lines.append(f"activations recomputed: {event['recomputed']}")
    return lines


def _batch(event: Event) -> str:
    batch, lanes, processes = event["effective_batch"], event["lanes"], event["processes"]
    work = f"effective batch {batch} = {lanes} lane{'s' * (lanes > 1)} × {batch // lanes}"
    if processes == 1:
        return f"{work} on one process"
    return f"{work} on {processes} processes (speed-up at most ×{event['speed_up_bound']:.3g})"


def _rates(event: Event) -> str:
    rates = list(dict.fromkeys(f"{rate:.3g}" for rate in event["learning_rates"]))
    precision = "" if event["precision"] == "fp32" else f" in {event['precision']}"
    return f"learning rate {' and '.join(rates)}{precision}"


def _metrics(event: Event) -> str:
    """Those that are numbers; a matrix is for the run's folder."""
    shown = ((name, value) for name, value in event["metrics"].items() if isinstance(value, int | float | str))
    return "  ".join(f"{name} {_number(value)}" for name, value in shown)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def _step(event: Event) -> list[str]:
    """A loop's own values may be of any kind: shown here are the loss, texts, and why it was stopped."""
    if "generation" in event:
        return search_words.generation(event)
    lines = [f"step {event['step']:>6}  loss {_number(event['loss'])}"] if "loss" in event else []
    for name, text in event.get("texts", {}).items():
        lines += [f"{name}:", *(f"    {line}" for line in text.splitlines())]
    return [*lines, f"stopped: {event['stopped']}"] if "stopped" in event else lines


def _traffic(event: Event) -> list[str]:
    if "gradient_bytes" not in event:
        return []
    sent, uncompressed = event["gradient_bytes"], event["uncompressed_bytes"]
    unit, name = (1e6, "MB") if uncompressed >= 1e6 else (1e3, "kB")
    return [f"gradients: {sent / unit:,.1f} {name} per step on the wire instead of {uncompressed / unit:,.1f}"]


def _end(event: Event) -> list[str]:
    if "evaluations" in event:
        return search_words.end(event)
    return [f"done after {event['step']} steps: test {_metrics(event)}  → {event['folder']}", *_traffic(event)]


_WORDS: dict[str, Callable[[Event], list[str]]] = {
    "start": _start,
    "step": _step,
    "eval": lambda event: [f"step {event['step']:>6}  epoch {event['epoch']:>3}  test: {_metrics(event)}"],
    "checkpoint": lambda event: [f"saved {event['path']}{', the best so far' * event.get('is_best', False)}"],
    "incident": lambda event: [event.get("text", f"incident at step {event['step']}")],
    "end": lambda event: [*_end(event), f"digest {event['digest']}"],
}
