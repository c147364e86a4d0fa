"""The processes that `lockstep bench` starts: one, and then N, each time once for all contenders."""

import re
import subprocess
import sys
from pathlib import Path

import typer

from lockstep.benchmark.catalogue import AGAIN, HAND_WRITTEN
from lockstep.benchmark.record import Record
from lockstep.benchmark.task import Task
from lockstep.errors import EXIT_HANG, EXIT_STOPPED, LockstepError

_MAX_LOG_CHARS = 4000


def measure(task: Task, processes: int, folder: Path, failures: dict[str, str], *, quiet: bool) -> Record:
    """Whatever fails is added to `failures`, with its reason, and the others begin again without it.

    They begin in new processes: a library that has failed in the middle of a step leaves others waiting for it.
    """
    while True:
        able = [entry for entry in task.entries if entry.can_run_on(processes) and entry.name not in failures]
        place = folder / f"{processes}-{len(failures)}"
        place.mkdir()
        code = _run(task._replace(entries=able, folder=str(place)), processes, place / "log", quiet=quiet)
        if code == 0:
            return Record(place)
        if code == EXIT_STOPPED:
            raise typer.Exit(code)
        failure, said = Record(place).failure(), (place / "log").read_text(errors="replace").strip()
        if failure is None or failure.name in (HAND_WRITTEN, AGAIN):
            where = "one process" if processes == 1 else f"{processes} processes"
            raise LockstepError(f"nothing could be measured on {where} (exit code {code}):\n{said[-_MAX_LOG_CHARS:]}")
        end = "it hung" if code == EXIT_HANG else f"ended with exit code {code}"
        failures[failure.name] = _cause(said) or failure.reason or end
        if not quiet:
            title = next(entry.title for entry in able if entry.name == failure.name)
            print(f"{title} failed: the others begin again without it", flush=True)


def _run(task: Task, processes: int, log: Path, *, quiet: bool) -> int:
    """The exit code. What the processes tell goes to the terminal, and what libraries say to the log."""
    from lockstep.observe.verification.trials import run_to_its_end

    several = ["-n", str(processes)] if processes > 1 else []
    command = [sys.executable, "-m", "lockstep", "run", *several, "-m", "lockstep.benchmark.rank", task.to_json()]
    with log.open("wb") as errors:
        return run_to_its_end(command, {}, subprocess.DEVNULL if quiet else None, errors)


def _cause(said: str) -> str | None:
    """As the launcher has it, which tells the rank that failed from those that lost it."""
    found = re.search("^lockstep: rank .*, the cause: (.*)$", said, re.MULTILINE)
    return None if found is None else found[1]
