"""Crash reports: which rank failed first, which ranks failed because of it, and the incident files.

When one rank dies, the others soon fail too, in whatever collective they are in, and often with more output. The cause
is found from how each rank's process ended and from the error reports that failing workers write
(`lockstep.launcher.worker_main`).
"""

import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.plurals import number_noun
from lockstep.errors import EXIT_FAILED, exit_code_of_signal
from lockstep.events.atomic_files import write_atomic
from lockstep.events.jsonl import parse_json
from lockstep.supervision.collective_mismatch import SAME_ORDER, UNKNOWN_MISMATCH, CollectiveMismatch
from lockstep.supervision.heartbeat import GENERATION_PHASES, STEP_PHASES, Heartbeat, Phase
from lockstep.supervision.linux_processes import signal_name

_MAX_REPORT_BYTES = 2**20
_MAX_INCIDENTS_PER_S = 1000

# Signals that end a process by its own fault or the kernel's decision. Not SIGABRT: a C++ runtime that loses its peer
# aborts with that.
_FATAL_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)

# "(pid 7) is killed by signal" from torch's signal handler; "(pid(s) 7, 8) exited unexpectedly" if the rank noticed it
# first, while waiting for data; "(pid 7) has died" from a lockstep loader.
_DEAD_DATA_WORKERS = re.compile(r"DataLoader worker \(pid(?:\(s\))? ([\d, ]+)\)")
# What a plain DataLoader raises if a worker dies while a tensor is being received from it, unless the worker raised it.
_LOST_CONNECTIONS = ("ConnectionResetError", "ConnectionRefusedError", "BrokenPipeError", "EOFError")
_LOADER = "torch/utils/data/dataloader.py"
_KILLED_DATA_WORKER = re.compile(r"DataLoader worker \(pid \d+\) (is killed by signal: Killed|has died \(SIGKILL\))")
_GLOO_ABORT = (
    "if gloo wrote `op.preamble.length <= op.nbytes` above, this rank and another one called different collectives"
)
_OUT_OF_MEMORY = "machine, or its control group, was out of memory"
_BEFORE_ANY_STEP = (Phase.STARTING, Phase.JOINING, Phase.SCRIPT, Phase.RESUMING)

# The exit codes of a rank that a stop signal has ended.
_STOP_REQUESTS = {exit_code_of_signal(number): number for number in (signal.SIGINT, signal.SIGTERM)}

# How likely a rank is the cause, the likeliest first: see `_suspicion`.
_KILLED, _RAISED, _EXITED_WITH_ERROR, _EXITED_EARLY, _LOST_CONTACT, _STILL_RUNNING = range(6)


@dataclass(frozen=True)
class ErrorReport:
    """What a failing worker wrote about its error. The field names are those of its JSON file."""

    time: float
    error: str
    traceback: str
    deliberate: bool  # raised by lockstep for the user to read: no traceback needed
    exit_code: int | None  # that the command should exit with
    communication: bool  # what a rank raises when *another* rank is gone


@dataclass(frozen=True)
class RankExit:
    """How one rank ended: with `exit_code`, negative for a signal, or None if it is still running."""

    rank: int
    exit_code: int | None
    report: ErrorReport | None = None
    heartbeat: Heartbeat | None = None  # its last


@dataclass(frozen=True)
class FailureContext:
    """What is known about the job and the machine when a rank fails."""

    world_size: int
    host: str = ""
    out_of_memory: bool = False  # the kernel made an out-of-memory kill during this attempt


@dataclass(frozen=True)
class FailureVerdict:
    """The explanation of a crash or a hang, and what follows from it."""

    exit_code: int
    messages: list[str]  # each to be printed on its own; one with a traceback has many lines
    cause: str  # in one line
    rank: int | None = None  # that caused it; None: it is on another machine, or unknown
    victims: tuple[int, ...] = ()
    is_final: bool = False  # any further attempt would fail in the same way
    is_from_outside: bool = False  # killed or stopped by somebody else, so the next attempt may succeed


def read_error_report(path: Path) -> ErrorReport | None:
    """Read a worker's error report; None if it left none, or none that can be read."""
    try:
        with path.open("rb") as file:
            data: Any = parse_json(file.read(_MAX_REPORT_BYTES))
        return ErrorReport(**data)
    except (OSError, ValueError, TypeError):
        return None


def read_announced_exit(path: Path) -> int | None:
    """Return the exit code of a rank whose script is over and whose process is about to end, or None."""
    try:
        return int(path.read_text()[:4])
    except (OSError, ValueError):
        return None


def write_incident(folder: Path, kind: str, text: str, facts: Mapping[str, Any]) -> Path:
    """Write a crash or hang report as text for people and as JSON for programs; return the path of the text.

    Args:
        folder: usually the run folder's `incidents/`.
        kind: `crash` or `hang`, part of the file names. Reports of the same second get different names.
        text: for people.
        facts: further entries of the JSON file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    names = (f"{stamp}-{kind}{f'-{number}' if number else ''}" for number in range(_MAX_INCIDENTS_PER_S))
    path = next(folder / f"{name}.txt" for name in names if not (folder / f"{name}.txt").exists())
    content = {"kind": kind, "t": time.time(), "text": text, **facts}
    write_atomic(path.with_suffix(".json"), json.dumps(content, indent=1, allow_nan=False) + "\n")
    write_atomic(path, text.encode(errors="backslashreplace").decode() + "\n")  # it may contain lone surrogates
    return path


def aborted_rank(exits: Sequence[RankExit]) -> int | None:
    """Return the rank that would be named as the cause, if it was aborted: [Note: gloo's abort]."""
    cause = min(exits, key=_suspicion)
    return cause.rank if cause.report is None and cause.exit_code == -signal.SIGABRT else None


def explain_failure(
    exits: Sequence[RankExit], context: FailureContext, deviation: CollectiveMismatch = UNKNOWN_MISMATCH
) -> FailureVerdict:
    """Name the rank that caused a failure, then its victims in one line.

    Args:
        exits: how each rank of this machine ended, or that it is still running.
        context: the job and the machine.
        deviation: if a rank was aborted, the ranks that called another collective than usual, or what all called.
    """
    cause = min(exits, key=_suspicion)
    if deviation.ranks:
        return _deviation(deviation, exits, cause, context)
    others = [each for each in exits if each is not cause]
    if cause.report is not None and cause.report.deliberate:
        return _deliberate_error(cause, cause.report, others)
    if cause.report is None and cause.exit_code in _STOP_REQUESTS:  # it alone: a request to the agent ends the job
        message = f"rank {cause.rank} was asked to stop ({_STOP_REQUESTS[cause.exit_code].name}), and saved nothing"
        return FailureVerdict(cause.exit_code, [message], message, cause.rank, is_final=True)
    if _suspicion(cause)[0] >= _LOST_CONTACT and context.world_size > len(exits):
        ranks = number_noun("rank", sorted(each.rank for each in exits))
        message = f"{ranks} of {context.world_size}: victims of a rank on another machine; see its output"
        return FailureVerdict(EXIT_FAILED, [message], message, is_from_outside=True)
    return _crash(cause, others, context, deviation.words)


def _deliberate_error(cause: RankExit, report: ErrorReport, others: Sequence[RankExit]) -> FailureVerdict:
    """Repeat a message that lockstep raised for the user; name its rank unless it applies to all ranks."""
    _, _, message = report.error.partition(": ")
    is_from_all = all(_says_the_same(each, report) for each in others)
    names_its_rank = message.startswith(f"rank {cause.rank} ")
    lines = message.splitlines() or [report.error.rstrip(": ")]  # an empty message: the error's name at least
    lines[0] = lines[0] if is_from_all or names_its_rank else f"rank {cause.rank}: {lines[0]}"
    return FailureVerdict(report.exit_code or EXIT_FAILED, lines, lines[0], cause.rank, is_final=True)


def _deviation(
    found: CollectiveMismatch, exits: Sequence[RankExit], aborted: RankExit, context: FailureContext
) -> FailureVerdict:
    """Blame the rank that called another collective, not the one that gloo aborted when it received its data.

    [Note: gloo's abort]

    If ranks call different collectives at the same time, the one that receives more data than it expects is aborted
    ("op.preamble.length <= op.nbytes"), with a Python error on no rank. That is often not the rank which went wrong.
    """
    rank, host = found.ranks[0], f" on {context.host}" if context.host else ""
    message = (
        f"rank {rank} of {context.world_size}{host}, the cause: it {found.words}, according to torch's flight "
        f"recorder; gloo seems to have aborted rank {aborted.rank} (killed by SIGABRT), which received its data in "
        f"another collective. {SAME_ORDER}"
    )
    victims = tuple(sorted(each.rank for each in exits if each.rank not in found.ranks))
    return FailureVerdict(EXIT_FAILED, [message], f"it {found.words}", rank, victims)


def _crash(cause: RankExit, others: Sequence[RankExit], context: FailureContext, called: str) -> FailureVerdict:
    """`called`: by the other ranks, if this one was aborted."""
    victims = sorted((each for each in others if each.exit_code != 0), key=lambda each: each.rank)
    words = _describe_cause(cause, context)
    host = f" on {context.host}" if context.host else ""
    place = describe_place(cause.heartbeat)
    heading = f"rank {cause.rank} of {context.world_size}{host} failed{place}, the cause: {words}"
    if context.world_size > 1 and aborted_rank([cause]) is not None:
        heading += f" ({_GLOO_ABORT}{f': {called}' if called else ''}; either may be wrong)"
    traceback = cause.report.traceback.rstrip() if cause.report is not None else ""
    listed = ", ".join(f"rank {each.rank} ({_describe_victim(each)})" for each in victims)
    tail = f"its victims: {listed}" if listed else ""
    return FailureVerdict(
        EXIT_FAILED,
        ["\n".join(part for part in (heading, traceback, tail) if part)],
        words,
        cause.rank,
        tuple(each.rank for each in victims),
        is_from_outside=_was_killed(cause) and not context.out_of_memory,
    )


def _says_the_same(other: RankExit, report: ErrorReport) -> bool:
    """Has another rank failed with the same message, or not yet got to the point where it would?

    An error before the first step would have occurred on every rank.
    """
    if other.report is not None and not other.report.communication:
        return other.report.error == report.error
    last = other.heartbeat
    return last is not None and last.step == 0 and last.phase in _BEFORE_ANY_STEP


def _was_killed(end: RankExit) -> bool:
    """Was the rank or one of its data workers killed? For a data worker, torch may say so only in the traceback."""
    if end.report is not None:
        return _KILLED_DATA_WORKER.search(f"{end.report.error}\n{end.report.traceback}") is not None
    return end.exit_code in (-signal.SIGKILL, -signal.SIGTERM)


def has_only_victims(exits: Sequence[RankExit]) -> bool:
    """Have ranks failed because they lost another rank, whose process has not ended yet?"""
    return any(each.exit_code is None for each in exits) and min(map(_suspicion, exits))[0] >= _LOST_CONTACT


def _suspicion(end: RankExit) -> tuple[int, float]:
    """Sort key: the likeliest cause first; among equals, the earliest report.

    Of several killed ranks, one that waited for another's gradients is less likely the cause: it did no work that could
    have exhausted the memory.
    """
    report = end.report
    if report is not None:
        return (_LOST_CONTACT if report.communication else _RAISED), report.time
    if end.exit_code is None:
        return _STILL_RUNNING, 0.0
    if -end.exit_code in _FATAL_SIGNALS:
        is_waiting = end.heartbeat is not None and end.heartbeat.phase == Phase.EXCHANGING
        return _KILLED, float(is_waiting)
    # A rank that exits early without an error makes the others fail as surely as one that crashes.
    return (_EXITED_WITH_ERROR if end.exit_code != 0 else _EXITED_EARLY), 0.0


def describe_place(last: Heartbeat | None) -> str:
    """Say where in the training a rank was, to follow a verb: ` in step 57 (forward and backward pass)`."""
    if last is None:
        return ""
    if last.phase in STEP_PHASES or last.is_in_step:
        return f" in step {last.step + 1} ({last.phase.words})"
    if last.phase in GENERATION_PHASES:
        return f" in generation {last.step + 1} ({last.phase.words})"
    if last.step > 0:
        return f" after step {last.step} ({last.phase.words})"
    return "" if last.phase in (Phase.SCRIPT, Phase.LEAVING) else f" while {last.phase.words}"


def _describe_cause(end: RankExit, context: FailureContext) -> str:
    if end.report is not None:
        return _first_line(end.report.error) + _describe_dead_data_workers(end, end.report, context)
    if end.exit_code is None:
        return "no rank reported an error; all were stopped"
    if end.exit_code == -signal.SIGKILL and context.out_of_memory:
        return f"killed by the kernel: the {_OUT_OF_MEMORY}"
    if end.exit_code < 0:
        return f"killed by {signal_name(-end.exit_code)}"
    if end.exit_code == 0:
        return "it finished early (exit code 0) while others still waited for it"
    return f"exited with code {end.exit_code}"


def _describe_dead_data_workers(end: RankExit, report: ErrorReport, context: FailureContext) -> str:
    """Return what torch's message omits: it names dead data workers by their process ids alone."""
    is_lost = report.error.startswith(_LOST_CONNECTIONS) and "Caught " not in report.error
    if is_lost and _LOADER in report.traceback:
        return " (to a data worker, which may have died)"
    match = _DEAD_DATA_WORKERS.search(report.error)
    if match is None:
        return ""
    dead = {int(pid) for pid in re.findall(r"\d+", match[1])}
    workers = [] if end.heartbeat is None else [each for each in end.heartbeat.data_workers if each.pid in dead]
    known = [f"data worker {each.number}, reading sample {each.sample}" for each in workers if each.sample is not None]
    known += [f"the {_OUT_OF_MEMORY}"] if context.out_of_memory else []
    return f" ({'; '.join(known)})" if known else ""


def _describe_victim(end: RankExit) -> str:
    if end.report is not None:
        return "lost contact" if end.report.communication else f"then raised {_first_line(end.report.error)}"
    if end.exit_code is None:
        return "stopped"
    if end.exit_code < 0:
        return f"ended by {signal_name(-end.exit_code)}"
    return "finished" if end.exit_code == 0 else f"exited with code {end.exit_code}"


def _first_line(text: str) -> str:
    # The line becomes an environment variable of the next attempt, which cannot hold lone surrogates or zero bytes.
    line = text.split("\n", 1)[0].encode(errors="backslashreplace").decode().replace("\0", "\\0")
    return line if len(line) <= 200 else line[:199] + "…"
