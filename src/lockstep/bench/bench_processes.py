"""Start the processes that `lockstep bench` measures with, and restart them without a contender that fails."""

import re
import subprocess
import sys
from pathlib import Path

import typer

from lockstep.bench.bench_record import BenchRecord, BenchTask
from lockstep.bench.contenders import AGAIN, HAND_WRITTEN
from lockstep.command_line.trial_runs import run_to_end
from lockstep.errors import EXIT_HANG, LockstepError, exit_code_of_signal
from lockstep.supervision.stop_signals import STOP_SIGNALS
from lockstep.terminal_text import print_line

_MAX_LOG_CHARS = 4000
_STOP_CODES = {exit_code_of_signal(number) for number in STOP_SIGNALS}


def measure(task: BenchTask, processes: int, folder: Path, failures: dict[str, str], *, quiet: bool) -> BenchRecord:
    """Measure all contenders that can run on this number of processes.

    Args:
        task: what to measure; its `folder` is replaced by a new one inside `folder`.
        processes: the number of processes to start.
        folder: where to put results and logs.
        failures: reasons by contender. Contenders in it are skipped; one that fails is added, and the others start
            again in new processes: a library that fails in the middle of a step leaves the other ranks waiting.
        quiet: print no progress.
    """
    while True:
        able = [each for each in task.contenders if each.can_run_on(processes) and each.name not in failures]
        attempt = folder / f"{processes}-{len(failures)}"
        attempt.mkdir()
        code = _run(task._replace(contenders=able, folder=str(attempt)), processes, attempt / "log", quiet=quiet)
        if code == 0:
            return BenchRecord(attempt)
        if code in _STOP_CODES:
            raise typer.Exit(code)
        failure, log = BenchRecord(attempt).failure(), (attempt / "log").read_text(errors="replace").strip()
        if failure is None or failure.name in (HAND_WRITTEN, AGAIN):
            where = "one process" if processes == 1 else f"{processes} processes"
            raise LockstepError(f"nothing could be measured on {where} (exit code {code}):\n{log[-_MAX_LOG_CHARS:]}")
        end = "it hung" if code == EXIT_HANG else f"ended with exit code {code}"
        failures[failure.name] = _cause(log) or failure.reason or end
        if not quiet:
            title = next(each.title for each in able if each.name == failure.name)
            print_line(f"{title} failed: starting again without it", flush=True)


def _run(task: BenchTask, processes: int, log: Path, *, quiet: bool) -> int:
    """Run the processes and return their exit code: progress goes to the terminal, library output to the log."""
    nproc = ["-n", str(processes)] if processes > 1 else []
    command = [sys.executable, "-m", "lockstep", "run", *nproc, "-m", "lockstep.bench.bench_rank", task.to_json()]
    with log.open("wb") as errors:
        return run_to_end(command, {}, subprocess.DEVNULL if quiet else None, errors)


def _cause(log: str) -> str | None:
    """Return the cause that the launcher reported, which is that of the rank that failed first."""
    found = re.search("^lockstep: rank .*, the cause: (.*)$", log, re.MULTILINE)
    return None if found is None else found[1]
