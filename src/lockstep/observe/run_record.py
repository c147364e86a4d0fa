"""Read a run folder into one record: settings, progress, metrics, restarts, incidents, timings.

Files are read line by line, and on each refresh only from where the last one ended. What is kept of them is bounded, so
a run of any length can be watched. Nothing in a folder is trusted: lines that a run would not write are skipped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.regular_files import open_to_read
from lockstep.errors import UserError
from lockstep.events.event_log import Event
from lockstep.events.jsonl import parse_attempt, parse_count, parse_json, parse_number
from lockstep.events.run_folder import RUN_FORMAT_VERSION, RunFolder
from lockstep.observe.curve import Curve
from lockstep.observe.evaluated_designs import EvaluatedDesigns
from lockstep.observe.jsonl_tail import JsonlTail, read_bounded
from lockstep.observe.step_timing import RankLogs

_MAX_FILE_BYTES = 2**20
_MAX_CURVES = 200
_MAX_NAMES = 50  # of images, and of texts
_MAX_HISTORY = 200  # the newest restarts, and the newest incidents
_MAX_DEPTH = 4  # of nested values
_NOT_METRICS = (
    "t",
    "attempt",
    "step",
    "kind",
    "epoch",
    "samples",
    "generation",
    "images",
    "texts",
    "design",
    "reasons",
)


class Restart(NamedTuple):
    """A later attempt of a run."""

    t: float
    attempt: int
    step: int  # that it resumed from
    num_lost: int  # steps that had to be repeated
    cause: str  # "": the user started it again
    num_processes: int | None


class Incident(NamedTuple):
    """A failure, as reported by the run or its launcher."""

    t: float
    step: int | None
    text: str


class LoggedImage(NamedTuple):
    """An image that the run logged."""

    step: int
    path: str  # relative to the run folder; taken from the event, so not to be trusted


class LoggedText(NamedTuple):
    """A text that the run logged."""

    step: int
    text: str


@dataclass
class CheckpointStats:
    """How many checkpoints a run saved, and what they cost."""

    num: int = 0
    newest_step: int | None = None
    best_step: int | None = None
    num_bytes: int = 0  # of the newest
    stall_s: float = 0.0  # how long they blocked training, in total
    write_s: float = 0.0


@dataclass
class RunRecord:
    """Everything that is known about a run."""

    path: Path
    run_info: Mapping[str, Any] = field(default_factory=dict)  # run.json; empty if the run has not started
    config: str = ""
    start: Event = field(default_factory=dict)  # the newest start event; empty if there is none
    end: Event | None = None
    began_t: float | None = None
    last_t: float | None = None
    attempt: int = 0
    step: int = 0
    epoch: int | None = None
    stopped: str = ""  # why the run stopped early, if it did
    curves: dict[str, Curve] = field(default_factory=dict)
    restarts: list[Restart] = field(default_factory=list)
    num_restarts: int = 0
    incidents: list[Incident] = field(default_factory=list)
    checkpoints: CheckpointStats = field(default_factory=CheckpointStats)
    images: dict[str, LoggedImage] = field(default_factory=dict)  # the newest of each name
    texts: dict[str, LoggedText] = field(default_factory=dict)
    ranks: RankLogs = field(init=False)
    designs: EvaluatedDesigns = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = RankLogs(RunFolder(self.path))
        self.designs = EvaluatedDesigns(RunFolder(self.path).evaluations)

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.path.resolve().name

    @property
    def is_search(self) -> bool:
        """Is it a search over designs, whose steps are generations?"""
        return "total_rounds" in self.start

    @property
    def is_ended(self) -> bool:
        """Has the run finished?"""
        return self.end is not None or self.start.get("is_done") is True

    @property
    def total_steps(self) -> int | None:
        """How many steps, or generations, the run is configured for."""
        return parse_count(self.start.get("total_rounds" if self.is_search else "total_steps"))

    @property
    def digest(self) -> str | None:
        """The digest of the final state; None if the run has not finished."""
        digest = None if self.end is None else self.end.get("digest")
        return digest if isinstance(digest, str) else None

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second while training, without saves and evaluations; None if no step has been timed."""
        times, batch = self.ranks.times(), parse_count(self.start.get("effective_batch"))
        return times[0].training_per_s * batch if times and batch else None


class RunReader:
    """Reads a run folder repeatedly, each time only what is new. It opens nothing for writing."""

    def __init__(self, path: Path) -> None:
        self._folder = RunFolder(path)
        self._reset()

    def _reset(self) -> None:
        self._record = RunRecord(self._folder.path)
        self._events = JsonlTail(self._folder.events)
        self._known_reports: set[str] = set()
        self._cause = ""
        self._num_lost = 0

    def read(self) -> RunRecord:
        """Return the record so far. Raises a UserError if the folder is not a run's or cannot be read."""
        try:
            return self._read()
        except OSError as error:
            path = error.filename or self._folder.path
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None

    def _read(self) -> RunRecord:
        if self._events.is_replaced() or self._record.ranks.is_replaced():
            self._reset()  # the folder was emptied, and now holds another run
        self._record.run_info = read_run_info(self._folder)
        config = read_bounded(self._folder.config, _MAX_FILE_BYTES) or b""
        self._record.config = config.decode(errors="replace")
        for event in self._events.read_new():
            self._add(event)
        self._read_incident_reports()
        self._record.ranks.refresh()
        self._record.designs.refresh()
        return self._record

    def _add(self, event: Event) -> None:
        step, attempt = parse_count(event.get("step")), parse_attempt(event.get("attempt"))
        t = parse_number(event.get("t"))
        if step is None or attempt is None or t is None or attempt < self._record.attempt:
            return
        record, kind = self._record, event.get("kind")
        if attempt > record.attempt:
            self._begin_attempt(attempt, step)
        record.began_t = t if record.began_t is None else record.began_t
        record.last_t = t
        record.step = max(record.step, step)
        if kind == "start":
            self._add_start(event, step, t)
        elif kind == "restart":
            self._cause = _text_in(event, "cause")
        elif kind == "step":
            self._add_step(event, step)
        elif kind == "eval":
            record.epoch = parse_count(event.get("epoch"))
            self._add_metrics({"train_loss": event.get("train_loss"), "test": event.get("metrics")}, step)
        elif kind == "checkpoint":
            self._add_checkpoint(event, step)
        elif kind == "incident":
            _append(record.incidents, Incident(t, step, _text_in(event, "text") or f"incident at step {step}"))
        elif kind == "end":
            record.end = event

    def _begin_attempt(self, attempt: int, step: int) -> None:
        """Drop what an earlier attempt did after this step."""
        record = self._record
        self._num_lost = max(0, record.step - step) if record.attempt else 0
        self._cause = ""
        for curve in record.curves.values():
            curve.drop_after(step)
        record.attempt, record.step, record.end, record.stopped = attempt, step, None, ""

    def _add_start(self, event: Event, step: int, t: float) -> None:
        record = self._record
        # A custom loop may start several times in one attempt.
        is_new_attempt = record.start.get("attempt") != event["attempt"]
        if record.start and is_new_attempt:
            processes = parse_count(event.get("processes"))
            restart = Restart(t, record.attempt, step, self._num_lost, self._cause, processes)
            _append(record.restarts, restart)
            record.num_restarts += 1
        record.start = event

    def _add_step(self, event: Event, step: int) -> None:
        record = self._record
        self._add_metrics({name: value for name, value in event.items() if name not in _NOT_METRICS}, step)
        for name, path in _mapping_in(event, "images").items():
            if isinstance(path, str) and (name in record.images or len(record.images) < _MAX_NAMES):
                record.images[name] = LoggedImage(step, path)
        for name, text in _mapping_in(event, "texts").items():
            if isinstance(text, str) and (name in record.texts or len(record.texts) < _MAX_NAMES):
                record.texts[name] = LoggedText(step, text)
        record.stopped = _text_in(event, "stopped") or record.stopped

    def _add_checkpoint(self, event: Event, step: int) -> None:
        stats = self._record.checkpoints
        stats.num += 1
        stats.newest_step = step
        stats.best_step = step if event.get("is_best") is True else stats.best_step
        stats.num_bytes = parse_count(event.get("num_bytes")) or stats.num_bytes
        stats.stall_s += parse_number(event.get("stall_s")) or 0.0
        stats.write_s += parse_number(event.get("write_s")) or 0.0

    def _add_metrics(self, values: Mapping[str, Any], step: int, prefix: str = "", depth: int = 0) -> None:
        for name, value in values.items():
            if isinstance(value, dict) and depth < _MAX_DEPTH:
                self._add_metrics(value, step, f"{prefix}{name}/", depth + 1)
                continue
            number, curves = parse_number(value), self._record.curves
            if number is not None and (prefix + name in curves or len(curves) < _MAX_CURVES):
                curves.setdefault(prefix + name, Curve()).add(step, number)

    def _read_incident_reports(self) -> None:
        """Read the reports that the launcher wrote to incidents/."""
        paths = sorted((self._folder.path / "incidents").glob("*.json"))[-_MAX_HISTORY:]
        for path in paths:
            if path.name in self._known_reports:
                continue
            self._known_reports.add(path.name)
            report = _json_in(path)
            text, t = _text_in(report, "text"), parse_number(report.get("t"))
            if text and t is not None:
                ranks = _mapping_in(report, "ranks")
                steps = [parse_count(_mapping_in(ranks, rank).get("step")) for rank in ranks]
                newest_step = max((step for step in steps if step is not None), default=None)
                _append(self._record.incidents, Incident(t, newest_step, text))
        self._record.incidents.sort(key=lambda incident: incident.t)


def read_record(path: Path) -> RunRecord:
    """Read a run folder once."""
    return RunReader(path).read()


def read_run_info(folder: RunFolder) -> dict[str, Any]:
    """Return run.json, or {} for a run that is only just starting. Raises a UserError if it is not a run folder."""
    if not folder.path.is_dir():
        raise UserError(f"{folder.path} is not a folder: expected a run folder such as runs/digits")
    try:
        with open_to_read(folder.run_json) as file:
            text = file.read(_MAX_FILE_BYTES)
    except FileNotFoundError:
        if any(not entry.name.startswith(".") and entry != folder.config for entry in folder.path.iterdir()):
            raise UserError(f"{folder.path} is not a run folder: it has no run.json") from None
        return {}
    except OSError as error:
        raise UserError(f"{folder.run_json} cannot be read: {error.strerror}") from None
    try:
        run_info = parse_json(text)
    except ValueError:
        run_info = None
    if not isinstance(run_info, dict) or not isinstance(run_info.get("run_id"), str):
        raise UserError(f"{folder.run_json} is damaged: expected a JSON object with a run_id")
    if run_info.get("format") != RUN_FORMAT_VERSION:
        found = str(run_info.get("format"))[:20]
        raise UserError(f"{folder.run_json}: format {found!r}, but this version of lockstep reads {RUN_FORMAT_VERSION}")
    return run_info


def _json_in(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_bounded(path, _MAX_FILE_BYTES) or b"")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _mapping_in(event: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = event.get(name)
    return value if isinstance(value, dict) else {}


def _text_in(event: Mapping[str, Any], name: str) -> str:
    value = event.get(name)
    return value if isinstance(value, str) else ""


def _append(history: list[Any], entry: Restart | Incident) -> None:
    history.append(entry)
    del history[:-_MAX_HISTORY]
