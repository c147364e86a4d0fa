"""One run folder as a value: what the run is, how far it has come, what happened to it.

Files are read line by line, and again only from where the last look ended. Whatever is kept of them is bounded, so that
a run of any length can be watched. Nothing in a folder is trusted: what is not as a run writes it is passed over.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.json_text import parse_json
from lockstep.errors import UserError
from lockstep.events.event import Event
from lockstep.events.run_folder import FORMAT_VERSION, RunFolder
from lockstep.observe.curve import Curve, count_in, number_in
from lockstep.observe.designs import Designs
from lockstep.observe.growing import GrowingLines, read_bounded
from lockstep.observe.timing import RankLogs

_MAX_FILE_BYTES = 2**20
_MOST_CURVES = 200
_MOST_NAMES = 50  # of images, and of texts
_MOST_HAPPENINGS = 200  # restarts, and incidents: the newest
_DEEPEST = 4  # level of values inside values
_NO_CURVES = ("t", "attempt", "step", "kind", "epoch", "samples", "generation", "images", "texts", "design", "reasons")


class Restart(NamedTuple):
    t: float
    attempt: int
    step: int  # from which it went on
    num_lost: int  # steps that had to be made again
    cause: str  # "": somebody started it again
    num_processes: int | None


class Incident(NamedTuple):
    t: float
    step: int | None
    text: str


class Image(NamedTuple):
    step: int
    path: str  # inside the run folder; as the event says it, so not to be trusted


class Text(NamedTuple):
    step: int
    text: str


@dataclass
class Saves:
    """Of checkpoints."""

    num: int = 0
    newest_step: int | None = None
    best_step: int | None = None
    num_bytes: int = 0  # of the newest
    stall_s: float = 0.0  # by which all of them held up training
    write_s: float = 0.0


@dataclass
class Record:
    path: Path
    facts: Mapping[str, Any] = field(default_factory=dict)  # of run.json; empty: the run has not begun
    config: str = ""
    start: Event = field(default_factory=dict)  # the newest; empty: not told yet
    end: Event | None = None
    began_t: float | None = None
    last_t: float | None = None
    attempt: int = 0
    step: int = 0
    epoch: int | None = None
    stopped: str = ""  # why it was ended before time, if it was
    curves: dict[str, Curve] = field(default_factory=dict)
    restarts: list[Restart] = field(default_factory=list)
    num_restarts: int = 0
    incidents: list[Incident] = field(default_factory=list)
    saves: Saves = field(default_factory=Saves)
    images: dict[str, Image] = field(default_factory=dict)  # the newest of each name
    texts: dict[str, Text] = field(default_factory=dict)
    ranks: RankLogs = field(init=False)
    designs: Designs = field(init=False)

    def __post_init__(self) -> None:
        self.ranks = RankLogs(RunFolder(self.path))
        self.designs = Designs(RunFolder(self.path).evaluations)

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def is_search(self) -> bool:
        return "total_rounds" in self.start

    @property
    def is_ended(self) -> bool:
        return self.end is not None or self.start.get("is_done") is True

    @property
    def total_steps(self) -> int | None:
        return count_in(self.start.get("total_rounds" if self.is_search else "total_steps"))

    @property
    def digest(self) -> str | None:
        digest = None if self.end is None else self.end.get("digest")
        return digest if isinstance(digest, str) else None

    @property
    def samples_per_s(self) -> float | None:
        """While training, without saves and evaluations; None, if no step was timed yet."""
        times, batch = self.ranks.times(), count_in(self.start.get("effective_batch"))
        return times[0].training_per_s * batch if times and batch else None


class RunReader:
    """Reads a run folder, as often as one likes; each time what is new. It opens nothing for writing."""

    def __init__(self, path: Path) -> None:
        self._folder = RunFolder(path)
        self._begin()

    def _begin(self) -> None:
        self._record = Record(self._folder.path)
        self._events = GrowingLines(self._folder.events)
        self._known_reports: set[str] = set()
        self._cause = ""
        self._num_lost = 0

    def read(self) -> Record:
        """The record so far; a folder that is not a run's, or cannot be read, is told."""
        try:
            return self._read()
        except OSError as error:
            where = error.filename or self._folder.path
            raise UserError(f"cannot read {where}: {error.strerror or error}") from None

    def _read(self) -> Record:
        if self._events.is_replaced() or self._record.ranks.is_replaced():
            self._begin()  # the folder was emptied and is used again
        self._record.facts = read_facts(self._folder)
        config = read_bounded(self._folder.config, _MAX_FILE_BYTES) or b""
        self._record.config = config.decode(errors="replace")
        for event in self._events.new():
            self._take(event)
        self._read_reports()
        self._record.ranks.look()
        self._record.designs.look()
        return self._record

    def _take(self, event: Event) -> None:
        step, attempt, t = count_in(event.get("step")), count_in(event.get("attempt")), number_in(event.get("t"))
        if step is None or attempt is None or t is None or attempt < self._record.attempt:
            return
        record, kind = self._record, event.get("kind")
        if attempt > record.attempt:
            self._begin_attempt(attempt, step)
        record.began_t = t if record.began_t is None else record.began_t
        record.last_t = t
        record.step = max(record.step, step)
        if kind == "start":
            self._take_start(event, step, t)
        elif kind == "restart":
            self._cause = _text_in(event, "cause")
        elif kind == "step":
            self._take_step(event, step)
        elif kind == "eval":
            record.epoch = count_in(event.get("epoch"))
            self._draw({"train_loss": event.get("train_loss"), "test": event.get("metrics")}, step)
        elif kind == "checkpoint":
            self._take_checkpoint(event, step)
        elif kind == "incident":
            _append(record.incidents, Incident(t, step, _text_in(event, "text") or f"incident at step {step}"))
        elif kind == "end":
            record.end = event

    def _begin_attempt(self, attempt: int, step: int) -> None:
        """What an earlier one did after this step is undone."""
        record = self._record
        self._num_lost = max(0, record.step - step) if record.attempt else 0
        self._cause = ""
        for curve in record.curves.values():
            curve.forget_after(step)
        record.attempt, record.step, record.end, record.stopped = attempt, step, None, ""

    def _take_start(self, event: Event, step: int, t: float) -> None:
        record = self._record
        is_first = record.start.get("attempt") != event["attempt"]  # a loop of one's own may start several times
        if record.start and is_first:
            processes = count_in(event.get("processes"))
            restart = Restart(t, record.attempt, step, self._num_lost, self._cause, processes)
            _append(record.restarts, restart)
            record.num_restarts += 1
        record.start = event

    def _take_step(self, event: Event, step: int) -> None:
        record = self._record
        self._draw({name: value for name, value in event.items() if name not in _NO_CURVES}, step)
        for name, path in _mapping_in(event, "images").items():
            if isinstance(path, str) and (name in record.images or len(record.images) < _MOST_NAMES):
                record.images[name] = Image(step, path)
        for name, text in _mapping_in(event, "texts").items():
            if isinstance(text, str) and (name in record.texts or len(record.texts) < _MOST_NAMES):
                record.texts[name] = Text(step, text)
        record.stopped = _text_in(event, "stopped") or record.stopped

    def _take_checkpoint(self, event: Event, step: int) -> None:
        saves = self._record.saves
        saves.num += 1
        saves.newest_step = step
        saves.best_step = step if event.get("is_best") is True else saves.best_step
        saves.num_bytes = count_in(event.get("num_bytes")) or saves.num_bytes
        saves.stall_s += number_in(event.get("stall_s")) or 0.0
        saves.write_s += number_in(event.get("write_s")) or 0.0

    def _draw(self, values: Mapping[str, Any], step: int, prefix: str = "", depth: int = 0) -> None:
        for name, value in values.items():
            if isinstance(value, dict) and depth < _DEEPEST:
                self._draw(value, step, f"{prefix}{name}/", depth + 1)
                continue
            found, curves = number_in(value), self._record.curves
            if found is not None and (prefix + name in curves or len(curves) < _MOST_CURVES):
                curves.setdefault(prefix + name, Curve()).add(step, found)

    def _read_reports(self) -> None:
        """What the launcher has left in incidents/."""
        paths = sorted((self._folder.path / "incidents").glob("*.json"))[-_MOST_HAPPENINGS:]
        for path in paths:
            if path.name in self._known_reports:
                continue
            self._known_reports.add(path.name)
            report = _json_in(path)
            text, t = _text_in(report, "text"), number_in(report.get("t"))
            if text and t is not None:
                places = [_mapping_in(_mapping_in(report, "ranks"), rank) for rank in _mapping_in(report, "ranks")]
                steps = [step for place in places if (step := count_in(place.get("step"))) is not None]
                _append(self._record.incidents, Incident(t, max(steps, default=None), text))
        self._record.incidents.sort(key=lambda incident: incident.t)


def read_record(path: Path) -> Record:
    """A run folder as it is now."""
    return RunReader(path).read()


def read_facts(folder: RunFolder) -> dict[str, Any]:
    """run.json; empty, if a run has only begun to settle here. What is no run's folder is told."""
    if not folder.path.is_dir():
        raise UserError(f"{folder.path} is not a folder: expected a run's, as in runs/digits")
    text = read_bounded(folder.facts, _MAX_FILE_BYTES)
    if text is None:
        if any(not entry.name.startswith(".") and entry != folder.config for entry in folder.path.iterdir()):
            raise UserError(f"{folder.path} is not a run folder: it has no run.json")
        return {}
    try:
        facts = parse_json(text)
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or not isinstance(facts.get("run_id"), str):
        raise UserError(f"{folder.facts} is damaged: it is not what a run writes there")
    if facts.get("format") != FORMAT_VERSION:
        raise UserError(
            f"{folder.facts}: format {str(facts.get('format'))[:20]!r}, and this lockstep reads {FORMAT_VERSION}"
        )
    return facts


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


def _append(happenings: list[Any], one: Restart | Incident) -> None:
    happenings.append(one)
    del happenings[:-_MOST_HAPPENINGS]
