"""`lockstep batch`: find the largest batch that fits into memory, and the fastest, by trying."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.batch.batch_trial_main import BatchTrialTask
from lockstep.command_line.config_arguments import ConfigArgument, SettingArguments
from lockstep.command_line.trial_runs import require_no_launcher
from lockstep.config.plurals import count_noun
from lockstep.errors import EXIT_FAILED, LockstepError, UserError
from lockstep.terminal_text import print_line

if TYPE_CHECKING:
    from lockstep.train.batch_search import BatchAttempt

# A process that runs out of memory may be ended by any of these.
_OUT_OF_MEMORY_SIGNALS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
_MAX_ERROR_CHARS = 4000


def batch(
    config: ConfigArgument,
    overrides: SettingArguments = None,
    nproc: Annotated[
        int,
        typer.Option("-n", "--nproc-per-node", metavar="N", min=1, help="Processes that will share this machine."),
    ] = 1,
    memory_gb: Annotated[
        float | None,
        typer.Option(
            "--memory-gb", metavar="G", min=0, help="Memory limit per process; default: its share of the machine."
        ),
    ] = None,
    limit_s: Annotated[
        float, typer.Option("--limit-s", metavar="S", min=1, help="Stop searching after this many seconds.")
    ] = 300.0,
    max_tries: Annotated[int, typer.Option("--tries", metavar="N", min=1, help="Try at most this many sizes.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the results, as JSON.")] = False,
) -> None:
    """Find the largest batch that fits into memory, and the fastest, by trying.

    \b
    lockstep batch gpt model.width=512
    lockstep batch mine.yaml -n 2 --limit-s 120

    Makes real steps with growing lanes, each size in a new process: doubles the size until it does not fit, then tries
    sizes in between. No model is trained, and no files are left behind. Exit code 0 if something fits; 3 if nothing
    does, or the search ended too early to tell.
    """
    from lockstep.batch.batch_advice import advise
    from lockstep.data.lanes import choose_lanes, share_lanes
    from lockstep.recipes.registry import load_training_recipe
    from lockstep.train.batch_search import search_sizes
    from lockstep.train.step_options import StepOptions
    from lockstep.train.strategies.strategy_factory import choose_strategy
    from lockstep.train.train_job import plan_batch, run_options
    from lockstep.world.world import World

    require_no_launcher("batch")
    changes = overrides or []
    _, settings = load_training_recipe(config, changes)
    choose_strategy(World(size=nproc), StepOptions(**run_options(settings)))  # raises the errors that `train` raises
    own = plan_batch(settings, World(size=nproc))
    lanes = choose_lanes(own.size) if own.lanes == "auto" else own.lanes
    if own.size < lanes or own.size % lanes:
        raise UserError(
            f"a batch of {own.size} cannot be divided evenly into lanes={lanes}: choose another number of lanes"
        )
    lanes_here = max(map(len, share_lanes(lanes, nproc).shares))
    table = _Table(lanes, quiet=as_json)
    with tempfile.TemporaryDirectory(prefix="lockstep-batch-") as folder:
        # A single process needs a power of two of lanes: round up.
        lanes_tried = 1 << (lanes_here - 1).bit_length()
        room = None if memory_gb is None else int(memory_gb * 1e9)
        task = BatchTrialTask(config, changes, 0, lanes_tried, nproc, room, os.getpid())
        trials = _Trials(task, lanes, Path(folder), table)
        found = search_sizes(trials.attempt, start=own.size // lanes, most=None, max_tries=max_tries, limit_s=limit_s)
    advice = advise(found, settings, own, lanes, nproc)
    if as_json:
        values = {**trials.device_info, "lanes": lanes, "processes": nproc, "ended": found.ended}
        tries = [attempt._asdict() for attempt in found.attempts]
        fastest = found.fastest.size if found.fastest else None
        print(json.dumps({**values, "tries": tries, "largest": found.largest, "fastest": fastest, **advice._asdict()}))
    else:
        print_line("\n".join(advice.lines))
    raise typer.Exit(0 if found.largest else EXIT_FAILED)


class _Trials:
    """Tries each size in a new process."""

    def __init__(self, task: BatchTrialTask, lanes: int, folder: Path, table: "_Table") -> None:
        self.device_info: dict[str, Any] = {}  # device and memory
        self._task = task
        self._lanes = lanes
        self._folder = folder
        self._table = table

    def attempt(self, size: int, left_s: float) -> "BatchAttempt | None":
        """Try a size; None if time ran out."""
        file = self._folder / f"{size}.json"
        task = json.dumps(self._task._replace(lane_batch=size)._asdict())
        command = [sys.executable, "-m", "lockstep.batch.batch_trial_main", task, str(file)]
        try:
            finished = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=left_s, check=False
            )
        except subprocess.TimeoutExpired:
            return None
        found = self._read(finished, file)
        if not self.device_info and "device" in found:
            self.device_info = {name: found[name] for name in ("device", "room_bytes")}
            self._table.begin(**self.device_info)
        return self._table.add(self._as_attempt(size, found))

    def _read(self, finished: "subprocess.CompletedProcess[str]", file: Path) -> dict[str, Any]:
        if file.exists():
            found: dict[str, Any] = json.loads(file.read_text())
            if "error" in found:
                raise (UserError if found["is_users"] else LockstepError)(found["error"])
            return found
        if -finished.returncode in _OUT_OF_MEMORY_SIGNALS:
            return {"fits": False, "why": f"ended by {signal.Signals(-finished.returncode).name}"}
        raise LockstepError(
            f"a trial ended with exit code {finished.returncode}:\n{finished.stderr.strip()[-_MAX_ERROR_CHARS:]}"
        )

    def _as_attempt(self, size: int, found: dict[str, Any]) -> "BatchAttempt":
        from lockstep.train.batch_search import BatchAttempt

        if not found["fits"]:
            return BatchAttempt(size, False, why=found["why"])
        most = None if found["num_samples"] is None else found["num_samples"] // self._lanes
        return BatchAttempt(size, True, found["peak_bytes"], found["sample_s"], most=most)


class _Table:
    """Prints a row for each size as soon as it has been tried."""

    def __init__(self, lanes: int, *, quiet: bool) -> None:
        self._lanes = lanes
        self._quiet = quiet

    def begin(self, device: str, room_bytes: int | None) -> None:
        room = "" if room_bytes is None else f", {_in_gigabytes(room_bytes)} for each process"
        self._print(f"on {device}{room}; a batch is {count_noun(self._lanes, 'lane')}")
        self._print(f"{'lane':>8} {'batch':>10} {'peak memory':>12} {'ms a sample':>12}")

    def add(self, attempt: "BatchAttempt") -> "BatchAttempt":
        peak = "–" if attempt.peak_bytes is None else _in_gigabytes(attempt.peak_bytes)
        rate = f"does not fit: {attempt.why}" if attempt.sample_s is None else f"{1e3 * attempt.sample_s:12.4f}"
        self._print(f"{attempt.size:>8} {attempt.size * self._lanes:>10} {peak:>12} {rate}")
        return attempt

    def _print(self, line: str) -> None:
        if not self._quiet:
            print_line(line, flush=True)


def _in_gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"
