"""`lockstep batch`: the largest batch that fits, and the fastest, found by trying."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.commands.batch_trial import Task
from lockstep.config import environment
from lockstep.errors import EXIT_FAILED, LockstepError, UserError

if TYPE_CHECKING:
    from lockstep.train.batch_search import Attempt

_DEATHS = (signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)  # by which lack of memory may show
_MAX_CHARS = 4000  # of what a trial has said


def batch(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML file, or a built-in recipe's name.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="key=value", help="Settings by dotted path: optim.lr=1e-3")
    ] = None,
    nproc: Annotated[
        int,
        typer.Option("-n", "--nproc-per-node", metavar="N", min=1, help="Processes that will share this machine."),
    ] = 1,
    memory_gb: Annotated[
        float | None,
        typer.Option("--memory-gb", metavar="G", min=0, help="Memory of each process; default: its share."),
    ] = None,
    limit_s: Annotated[
        float, typer.Option("--limit-s", metavar="S", min=1, help="Seconds after which the search ends.")
    ] = 300.0,
    max_tries: Annotated[int, typer.Option("--tries", metavar="N", min=1, help="Sizes to try at most.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings alone, as JSON.")] = False,
) -> None:
    """Find the largest batch that fits into memory, and the fastest, by trying.

    \b
    lockstep batch gpt model.width=512
    lockstep batch mine.yaml -n 2 --limit-s 120

    Makes real steps with growing lanes, each size in a process of its own: doubled until one does not fit, then in
    between. Nothing is trained or left behind. Exit code 0: something fits; 3: nothing does, or the search
    ended too early to tell.
    """
    from lockstep.data.lanes import choose_lanes, share_lanes
    from lockstep.recipes.registry import load_training_recipe
    from lockstep.train.batch_advice import advise
    from lockstep.train.batch_search import search_sizes
    from lockstep.train.job import global_batch, step_options
    from lockstep.train.options import StepOptions
    from lockstep.train.strategies.choice import choose_strategy
    from lockstep.world.world import World

    if environment.role(nproc_given=False) == "worker":
        raise UserError("lockstep batch starts its processes itself: start it once, without a launcher")
    changes = overrides or []
    _, settings = load_training_recipe(config, changes)
    choose_strategy(World(size=nproc), StepOptions.read(step_options(settings)))  # or an error, as `train` has it
    own = global_batch(settings, World(size=nproc))
    lanes = choose_lanes(own.size) if own.lanes == "auto" else own.lanes
    if own.size < lanes or own.size % lanes:
        raise UserError(f"a batch of {own.size} cannot be cut into lanes={lanes} evenly: choose another lanes")
    lanes_here = max(map(len, share_lanes(lanes, nproc).shares))
    table = _Table(lanes, quiet=as_json)
    with tempfile.TemporaryDirectory(prefix="lockstep-batch-") as folder:
        # A process alone has a power of two of lanes: rather too many than too few.
        lanes_tried = 1 << (lanes_here - 1).bit_length()
        room = None if memory_gb is None else int(memory_gb * 1e9)
        task = Task(config, changes, 0, lanes_tried, nproc, room, os.getpid())
        trials = _Trials(task, lanes, Path(folder), table)
        found = search_sizes(trials.attempt, start=own.size // lanes, most=None, max_tries=max_tries, limit_s=limit_s)
    advice = advise(found, settings, own, lanes, nproc)
    if as_json:
        facts = {**trials.facts, "lanes": lanes, "processes": nproc, "ended": found.ended}
        tries = [attempt._asdict() for attempt in found.attempts]
        fastest = found.fastest.size if found.fastest else None
        print(json.dumps({**facts, "tries": tries, "largest": found.largest, "fastest": fastest, **advice._asdict()}))
    else:
        print("\n".join(advice.lines))
    raise typer.Exit(0 if found.largest else EXIT_FAILED)


class _Trials:
    """Each size in a process of its own."""

    def __init__(self, task: Task, lanes: int, folder: Path, table: "_Table") -> None:
        self.facts: dict[str, Any] = {}  # about the device
        self._task = task
        self._lanes = lanes
        self._folder = folder
        self._table = table

    def attempt(self, size: int, left_s: float) -> "Attempt | None":
        file = self._folder / f"{size}.json"
        task = json.dumps(self._task._replace(lane_batch=size)._asdict())
        command = [sys.executable, "-m", "lockstep.commands.batch_trial", task, str(file)]
        try:
            finished = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=left_s, check=False
            )
        except subprocess.TimeoutExpired:
            return None
        found = self._read(finished, file)
        if not self.facts and "device" in found:
            self.facts = {name: found[name] for name in ("device", "room_bytes")}
            self._table.begin(**self.facts)
        return self._table.add(self._as_attempt(size, found))

    def _read(self, finished: "subprocess.CompletedProcess[str]", file: Path) -> dict[str, Any]:
        if file.exists():
            found: dict[str, Any] = json.loads(file.read_text())
            if "error" in found:
                raise (UserError if found["is_users"] else LockstepError)(found["error"])
            return found
        if -finished.returncode in _DEATHS:
            return {"fits": False, "why": f"ended by {signal.Signals(-finished.returncode).name}"}
        raise LockstepError(f"a trial ended with code {finished.returncode}:\n{finished.stderr.strip()[-_MAX_CHARS:]}")

    def _as_attempt(self, size: int, found: dict[str, Any]) -> "Attempt":
        from lockstep.train.batch_search import Attempt

        if not found["fits"]:
            return Attempt(size, False, why=found["why"])
        most = None if found["num_samples"] is None else found["num_samples"] // self._lanes
        return Attempt(size, True, found["peak_bytes"], found["sample_s"], most=most)


class _Table:
    """A row for each size, as soon as it is known."""

    def __init__(self, lanes: int, *, quiet: bool) -> None:
        self._lanes = lanes
        self._quiet = quiet

    def begin(self, device: str, room_bytes: int | None) -> None:
        room = "" if room_bytes is None else f", {_gigabytes(room_bytes)} for each process"
        self._print(f"on {device}{room}; a batch is {self._lanes} lane{'s' * (self._lanes > 1)}")
        self._print(f"{'lane':>8} {'batch':>10} {'peak memory':>12} {'ms a sample':>12}")

    def add(self, attempt: "Attempt") -> "Attempt":
        peak = "–" if attempt.peak_bytes is None else _gigabytes(attempt.peak_bytes)
        rate = f"does not fit: {attempt.why}" if attempt.sample_s is None else f"{1e3 * attempt.sample_s:12.4f}"
        self._print(f"{attempt.size:>8} {attempt.size * self._lanes:>10} {peak:>12} {rate}")
        return attempt

    def _print(self, line: str) -> None:
        if not self._quiet:
            print(line, flush=True)


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"
