"""Who failed first, who merely suffered from it, and how to say so.

When one rank dies the others soon fail too, in whatever collective they were in, and often louder. The cause is found
from how each rank ended and from the reports that failing workers leave (`lockstep.launcher.worker`).
"""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.json_text import parse_json
from lockstep.errors import EXIT_FAILED, EXIT_STOPPED
from lockstep.supervision.process import signal_name
from lockstep.supervision.pulse import IN_A_GENERATION, IN_A_STEP, Phase, Reading

_MAX_REPORT_BYTES = 2**20

# A process ends with these by its own fault or the kernel's; SIGABRT is also how a C++ runtime dies of a lost peer.
_VIOLENT_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)

# "(pid 7) is killed by signal" from torch's handler of the signal; "(pid(s) 7, 8) exited unexpectedly" where the rank,
# waiting for data, looked first; "(pid 7) has died" from a loader of lockstep's.
_DEAD_DATA_WORKERS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
# What a plain DataLoader raises where a worker dies while a tensor is taken from it, unless the worker raised it.
_LOST_CONNECTIONS = ("ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError")
_LOADER = "torch/utils/data/dataloader.py"
_KILLED_DATA_WORKER = re.compile(r"DataLoader worker \(pid \d+\) (is killed by signal: Killed|has died \(SIGKILL\))")
_OUT_OF_MEMORY = "machine, or its control group, was out of memory"
_BEFORE_ANY_STEP = (Phase.STARTING, Phase.JOINING, Phase.SCRIPT, Phase.RESUMING)
_LOST_CONTACT = 4  # a degree of suspicion, see `_suspicion`


@dataclass(frozen=True)
class Report:
    """What a failing worker wrote about itself."""

    time: float
    error: str
    traceback: str
    deliberate: bool
    exit_code: int | None
    communication: bool


@dataclass(frozen=True)
class RankEnd:
    """How one rank stands: ended by itself with `exit_code` (negative: a signal), or still running, with None."""

    rank: int
    exit_code: int | None
    report: Report | None = None
    pulse: Reading | None = None  # its last


@dataclass(frozen=True)
class Scene:
    """Where it happened."""

    world_size: int
    host: str = ""
    out_of_memory: bool = False  # the kernel has killed something for want of memory meanwhile


@dataclass(frozen=True)
class Verdict:
    exit_code: int
    messages: list[str]  # each to be said on its own; one with a traceback has many lines
    cause: str  # in a line
    rank: int | None = None  # the culprit; None: it is on another machine
    victims: tuple[int, ...] = ()
    is_final: bool = False  # it would be the same again, whatever is tried
    is_from_outside: bool = False  # somebody has killed it: that says nothing about the next attempt


def read_report(path: Path) -> Report | None:
    """A worker's report, or None if it left none that can be read."""
    try:
        with path.open("rb") as file:
            data: Any = parse_json(file.read(_MAX_REPORT_BYTES))
        return Report(**data)
    except (OSError, ValueError, TypeError):
        return None


def read_announced_end(path: Path) -> int | None:
    """The exit code of a rank whose script is over and whose process is about to end, if it is so."""
    try:
        return int(path.read_text()[:4])
    except (OSError, ValueError):
        return None


def explain(ends: Sequence[RankEnd], scene: Scene) -> Verdict:
    """Name the cause first and its victims in one line. `ends` are this machine's ranks."""
    world_size = scene.world_size
    cause = min(ends, key=_suspicion)
    others = [end for end in ends if end is not cause]
    if cause.report is not None and cause.report.deliberate:
        same = [end for end in others if _says_the_same(end, cause.report)]
        _, _, message = cause.report.error.partition(": ")
        speaks_for_all = len(same) == len(others) or message.startswith(f"rank {cause.rank} ")
        lines = message.splitlines() or [cause.report.error.rstrip(": ")]  # nothing was said: its name at least
        lines[0] = lines[0] if speaks_for_all else f"rank {cause.rank}: {lines[0]}"
        return Verdict(cause.report.exit_code or EXIT_FAILED, lines, lines[0], cause.rank, is_final=True)
    if cause.exit_code == EXIT_STOPPED and cause.report is None:
        message = f"rank {cause.rank} was asked to stop before its first step"
        return Verdict(EXIT_STOPPED, [message], message, cause.rank, is_final=True)
    # A rank that was done is nobody's victim.
    victims = sorted((end for end in others if end.exit_code != 0), key=lambda end: end.rank)
    if _suspicion(cause)[0] >= _LOST_CONTACT and world_size > len(ends):
        everyone = ", ".join(str(end.rank) for end in sorted(ends, key=lambda end: end.rank))
        message = f"rank {everyone} of {world_size}: victims of a rank on another machine; see there"
        return Verdict(EXIT_FAILED, [message], message, is_from_outside=True)
    account = cause.report.traceback.rstrip() if cause.report is not None else ""
    words = _cause_in_words(cause, scene)
    host = f" on {scene.host}" if scene.host else ""
    heading = f"rank {cause.rank} of {world_size}{host} failed{place_in_words(cause.pulse)}, the cause: {words}"
    suffering = ", ".join(f"rank {end.rank} ({_suffering_in_words(end)})" for end in victims)
    tail = f"its victims: {suffering}" if suffering else ""
    return Verdict(
        EXIT_FAILED,
        ["\n".join(part for part in (heading, account, tail) if part)],
        words,
        cause.rank,
        tuple(end.rank for end in victims),
        is_from_outside=_was_killed(cause) and not scene.out_of_memory,
    )


def _says_the_same(end: RankEnd, told: Report) -> bool:
    """Or has it not come that far yet? What one rank refuses before its first step, it would have refused as well."""
    if end.report is not None and not end.report.communication:
        return end.report.error == told.error
    return end.pulse is not None and end.pulse.step == 0 and end.pulse.phase in _BEFORE_ANY_STEP


def _was_killed(end: RankEnd) -> bool:
    """It, or a data worker of its own. Torch may tell of that only in the error that its error came from."""
    if end.report is not None:
        return _KILLED_DATA_WORKER.search(f"{end.report.error}\n{end.report.traceback}") is not None
    return end.exit_code in (-signal.SIGKILL, -signal.SIGTERM)


def only_victims(ends: Sequence[RankEnd]) -> bool:
    """Have some ranks failed for want of another, while that other has not ended yet?"""
    return any(end.exit_code is None for end in ends) and min(map(_suspicion, ends))[0] >= _LOST_CONTACT


def _suspicion(end: RankEnd) -> tuple[int, float]:
    """The smaller, the likelier the cause; the earliest report decides among equals."""
    report = end.report
    if report is not None:
        return (_LOST_CONTACT if report.communication else 1), report.time
    if end.exit_code is None:
        return _LOST_CONTACT + 1, 0.0
    if -end.exit_code in _VIOLENT_SIGNALS:
        return 0, 0.0
    # A rank that left early without a word makes the others fail as surely as one that crashed.
    return (2 if end.exit_code != 0 else 3), 0.0


def place_in_words(pulse: Reading | None) -> str:
    """Where in the training a rank was, to follow a verb: ` in step 57 (forward and backward pass)`."""
    if pulse is None:
        return ""
    if pulse.phase in IN_A_STEP:
        return f" in step {pulse.step + 1} ({pulse.phase.words})"
    if pulse.phase in IN_A_GENERATION:
        return f" in generation {pulse.step + 1} ({pulse.phase.words})"
    if pulse.step > 0:
        return f" after step {pulse.step} ({pulse.phase.words})"
    return "" if pulse.phase in (Phase.SCRIPT, Phase.LEAVING) else f" while {pulse.phase.words}"


def _cause_in_words(end: RankEnd, scene: Scene) -> str:
    if end.report is not None:
        return _first_line(end.report.error) + _data_worker_in_words(end, scene)
    if end.exit_code is None:
        return "no rank left word; all were stopped"
    if end.exit_code == -signal.SIGKILL and scene.out_of_memory:
        return f"killed by the kernel: the {_OUT_OF_MEMORY}"
    if end.exit_code < 0:
        return f"killed by {signal_name(-end.exit_code)}"
    if end.exit_code == 0:
        return "it finished early (exit code 0) while others still waited for it"
    return f"exited with code {end.exit_code}"


def _data_worker_in_words(end: RankEnd, scene: Scene) -> str:
    """Torch names the data workers that died by their process ids alone."""
    report = end.report
    if report is None:
        return ""
    is_lost = report.error.startswith(_LOST_CONNECTIONS) and "Caught " not in report.error
    if is_lost and _LOADER in report.traceback:
        return " (to a data worker, which may have died)"
    match = _DEAD_DATA_WORKERS.search(report.error)
    if match is None:
        return ""
    dead = {int(pid) for pid in re.findall(r"\d+", match[1])}
    workers = [] if end.pulse is None else [each for each in end.pulse.data_workers if each.pid in dead]
    told = [f"data worker {each.number}, reading sample {each.sample}" for each in workers if each.sample is not None]
    told += [f"the {_OUT_OF_MEMORY}"] if scene.out_of_memory else []
    return f" ({'; '.join(told)})" if told else ""


def _suffering_in_words(end: RankEnd) -> str:
    if end.report is not None:
        return "lost contact" if end.report.communication else f"then raised {_first_line(end.report.error)}"
    if end.exit_code is None:
        return "stopped"
    if end.exit_code < 0:
        return f"ended by {signal_name(-end.exit_code)}"
    return "finished" if end.exit_code == 0 else f"exited with code {end.exit_code}"


def _first_line(text: str) -> str:
    # As a variable of the next attempt it can hold neither what no encoding has nor a zero.
    line = text.split("\n", 1)[0].encode(errors="backslashreplace").decode().replace("\0", "\\0")
    return line if len(line) <= 200 else line[:199] + "…"
