"""Show a run's events: a progress bar on a terminal, plain lines elsewhere, or JSON."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.config.plurals import count_noun
from lockstep.events.event_log import Event, Sink
from lockstep.events.guarded_sink import GuardedSink
from lockstep.terminal_text import escape_controls

_GENES_PER_LINE = 6


def console_for(stream: TextIO | None = None, *, quiet: bool = False, as_json: bool = False) -> list[Sink]:
    """Return the sinks that show a run on `stream`; none if `quiet`. If the stream fails, training goes on without.

    Args:
        stream: where to write; None: standard output.
        quiet: show nothing, unless `as_json` is set.
        as_json: write the events themselves, one JSON object per line.
    """
    stream = sys.stdout if stream is None else stream
    if as_json:
        return [GuardedSink(JsonConsole(stream), "the console")]
    if quiet:
        return []
    console = ProgressConsole(stream) if stream.isatty() else PlainConsole(stream)
    return [GuardedSink(console, "the console")]


class PlainConsole:
    """Describes each event in one or more lines, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def emit(self, event: Event) -> None:
        """Print an event."""
        for line in describe_event(event):
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing: the stream stays open."""


class JsonConsole:
    """Prints the events themselves, one JSON object per line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def emit(self, event: Event) -> None:
        """Print an event."""
        print(json.dumps(event), file=self._stream, flush=True)

    def close(self) -> None:
        """Do nothing: the stream stays open."""


class ProgressConsole:
    """Shows a live bar with the loss, or with a search's best values; other events scroll above it."""

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("training", total=None, loss="")

    def emit(self, event: Event) -> None:
        """Move the bar, or print an event above it."""
        if event["kind"] == "step" and "loss" in event:
            self._progress.update(self._task, completed=event["step"], loss=f"loss {_number(event['loss'])}")
            return
        if event["kind"] == "step" and "generation" in event:
            best = "" if event["found"] is None else escape_controls(f"best {_named_values(event['found'])}")
            self._progress.update(self._task, completed=event["step"], loss=best)
            if event["design"] is None and not event["reasons"]:
                return
        if event["kind"] == "end":
            self._progress.update(self._task, completed=event["step"])
            self._progress.stop()  # first, so that the result is printed below the bar
        for line in describe_event(event):
            self._console.print(line, markup=False)
        if event["kind"] == "start":
            self._start_bar(event)

    def close(self) -> None:
        """Stop the bar."""
        self._progress.stop()

    def _start_bar(self, event: Event) -> None:
        is_search = "total_rounds" in event
        self._progress.update(
            self._task,
            total=event["total_rounds"] if is_search else event["total_steps"],
            completed=event["step"],
            description="searching" if is_search else "training",
        )
        self._progress.start()


def describe_event(event: Event) -> list[str]:
    """Describe an event in one or more lines."""
    describe = _DESCRIBE.get(event["kind"])
    lines = [f"{event['kind']} at step {event['step']}"] if describe is None else describe(event)
    return [escape_controls(line) for line in lines]


def _start(event: Event) -> list[str]:
    lines = []
    if event["backend"] is not None:
        lines.append(f"Initialized DDP with {event['processes']} processes ({event['backend']}, {event['device']})")
    if event["launcher"] not in ("none", "lockstep"):
        lines.append(f"these processes are workers, supervised by the launcher that started them ({event['launcher']})")
    if event.get("is_done"):
        lines.append(f"nothing left to do: the run has finished after step {event['step']} ({event['resumed']})")
    elif event["resumed"] is not None:
        lines.append(f"resumed at step {event['step']} from {event['resumed']} (attempt {event['attempt']})")
    elif event["attempt"] > 1:
        lines.append(f"attempt {event['attempt']}: no checkpoint in this folder yet, starting from the first step")
    if "total_rounds" in event:
        return [*lines, _search_start(event)]
    lines.append(
        f"{event['recipe']}: {count_noun(event['parameters'], 'parameter')} on {event['device']}, "
        f"{_batch(event)}, {_learning_rates(event)}{_length(event)} → {event['folder']}"
    )
    if event["processes"] > 1:
        lines.append(f"parallel: {event['parallel']} ({event['why_parallel']})")
    if "recomputed" in event:
        lines.append(f"activations recomputed: {event['recomputed']}")
    return lines


def _batch(event: Event) -> str:
    batch, lanes, processes = event["effective_batch"], event["lanes"], event["processes"]
    split = f"effective batch {batch} = {count_noun(lanes, 'lane')} × {batch // lanes}"
    if processes == 1:
        return f"{split} on one process"
    return f"{split} on {processes} processes (speed-up at most ×{event['speed_up_bound']:.3g})"


def _learning_rates(event: Event) -> str:
    rates = list(dict.fromkeys(f"{rate:.3g}" for rate in event["learning_rates"]))
    precision = "" if event["precision"] == "fp32" else f" in {event['precision']}"
    return f"learning rate {' and '.join(rates)}{precision}"


def _length(event: Event) -> str:
    """Format the number of steps, which is not known in advance if the data is a stream."""
    return "" if event["total_steps"] is None else f", {count_noun(event['total_steps'], 'step')}"


def _step(event: Event) -> list[str]:
    """A custom loop may log values of any kind: show only the loss, texts and the reason for stopping."""
    if "generation" in event:
        return _generation(event)
    lines = [f"step {event['step']:>6}  loss {_number(event['loss'])}"] if "loss" in event else []
    for name, text in event.get("texts", {}).items():
        lines += [f"{name}:", *(f"    {line}" for line in text.splitlines())]
    return [*lines, f"stopped: {event['stopped']}"] if "stopped" in event else lines


def _end(event: Event) -> list[str]:
    if "evaluations" in event:
        lines = _search_end(event)
    else:
        lines = [f"done after {count_noun(event['step'], 'step')}: test {_metrics(event)}  → {event['folder']}"]
        lines += _compression(event)
    return [*lines, f"digest {event['digest']}"]


def _compression(event: Event) -> list[str]:
    if "gradient_bytes" not in event:
        return []
    sent, uncompressed = event["gradient_bytes"], event["uncompressed_bytes"]
    unit, name = (1e6, "MB") if uncompressed >= 1e6 else (1e3, "kB")
    return [f"gradients: {sent / unit:,.1f} {name} per step on the wire instead of {uncompressed / unit:,.1f}"]


def _metrics(event: Event) -> str:
    """Format the metrics that are single numbers; a confusion matrix is only in the run folder."""
    shown = ((name, value) for name, value in event["metrics"].items() if isinstance(value, int | float | str))
    return "  ".join(f"{name} {_number(value)}" for name, value in shown)


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4f}"


def _search_start(event: Event) -> str:
    objectives = ", ".join(f"{name} ({direction})" for name, direction in event["objectives"].items())
    method = "guided by a network" if event["guided"] else "evolution only"
    return (
        f"{event.get('recipe', 'search')}: {count_noun(event['genes'], 'gene')}, "
        f"{count_noun(event['population'], 'design')} per generation, "
        f"{count_noun(event['total_rounds'], 'generation')}, {method}; {objectives} → {event.get('folder')}"
    )


def _generation(event: Event) -> list[str]:
    """Describe a generation of a search, and the best design if it is a new one."""
    parts = [f"generation {event['step']:>4}"]
    parts.append("no design yet" if event["found"] is None else f"best {_named_values(event['found'])}")
    if event["front"] is not None:
        parts.append(f"front of {event['front']}")
    if event["median"] is not None:
        parts.append(f"median {_named_values(event['median'])}")
    failed = f" ({event['failed']} failed)" if event["failed"] else ""
    parts.append(f"{event['evaluated']} evaluated{failed} in {event['evaluate_s']:.2f} s")
    lines = ["  ".join(parts)]
    lines += [f"    failed: {reason} (×{count})" for reason, count in event["reasons"].items()]
    return lines + ([] if event["design"] is None else _design(event["design"]))


def _search_end(event: Event) -> list[str]:
    best = "every evaluation failed" if event["metrics"] is None else f"best {_named_values(event['metrics'])}"
    failed = f" ({event['failures']} failed)" if event["failures"] else ""
    evaluations = count_noun(event["evaluations"], "evaluation")
    return [
        f"done after {count_noun(event['step'], 'generation')}, {evaluations}{failed}: {event['ended']}",
        f"{best}  → {event['folder']}",
        *([] if event["design"] is None else _design(event["design"])),
    ]


def _design(genes: Mapping[str, Any]) -> list[str]:
    shown = [_named_values({name: value}) for name, value in genes.items()]
    rows = [shown[start : start + _GENES_PER_LINE] for start in range(0, len(shown), _GENES_PER_LINE)]
    return [f"    {', '.join(row)}" for row in rows]


def _named_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


_DESCRIBE: dict[str, Callable[[Event], list[str]]] = {
    "start": _start,
    "step": _step,
    "eval": lambda event: [f"step {event['step']:>6}  epoch {event['epoch']:>3}  test: {_metrics(event)}"],
    "checkpoint": lambda event: [f"saved {event['path']}{', the best so far' * event.get('is_best', False)}"],
    "incident": lambda event: [event.get("text", f"incident at step {event['step']}")],
    "end": _end,
}
