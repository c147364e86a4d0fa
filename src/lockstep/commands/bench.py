"""`lockstep bench`: what does lockstep cost here, and does the number of processes change the answer?"""

import json
import math
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.benchmark.catalogue import CONTENDERS, HAND_WRITTEN, MODELS, PEERS, entries, lanes_for
from lockstep.benchmark.task import Task
from lockstep.commands.bench_processes import measure
from lockstep.commands.trial_folder import trial_folder
from lockstep.config import environment
from lockstep.config.arguments import require_known
from lockstep.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from lockstep.benchmark.comparison import Row

_DEVICES = ("cpu", "cuda")
_MODELS = "; ".join(f"{name}: {model.words}" for name, model in MODELS.items())


def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"What is trained. {_MODELS}.")] = "mlp",
    nproc: Annotated[
        int, typer.Option("-n", "--nproc-per-node", metavar="N", min=2, help="Processes to compare one with.")
    ] = 2,
    rounds: Annotated[int, typer.Option("--rounds", metavar="R", min=2, help="Times that each is timed.")] = 9,
    steps: Annotated[
        int | None,
        typer.Option("--steps", metavar="S", min=1, help="Of each round; after so many, weights are compared."),
    ] = None,
    batch: Annotated[int | None, typer.Option("--batch", metavar="B", min=1, help="Over all processes.")] = None,
    lanes: Annotated[
        int | None, typer.Option("--lanes", metavar="V", min=1, help="That lockstep is tried with, too; default: 8.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="NAME,NAME…", help=f"Out of {', '.join(CONTENDERS)}; default: all."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="cpu|cuda", help="Default: GPUs where there are some.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures alone, as JSON.")] = False,
) -> None:
    """Time a step against a loop written by hand, and compare the weights of one process and of N.

    \b
    lockstep bench
    lockstep bench gpt -n 4 --rounds 20
    lockstep bench tiny --against lockstep,accelerate

    Accelerate and Fabric stand beside lockstep where they are installed. Everything is timed in turn, round by round;
    ratios are to the hand-written loop on as many processes. Nothing is left behind. Exit code 0; 3: lockstep failed,
    or its own bits differed.
    """
    from lockstep.data.lanes import share_lanes

    require_known("lockstep bench has no model", [model], list(MODELS))
    chosen = CONTENDERS if against is None else [name.strip() for name in against.split(",")]
    if unknown := [name for name in chosen if name not in CONTENDERS]:
        raise UserError(f"--against {unknown[0][:40]}: expected names out of {', '.join(CONTENDERS)}")
    if environment.role(nproc_given=False) == "worker":
        raise UserError("lockstep bench starts its processes itself: start it once, without a launcher")
    if lanes is not None:
        share_lanes(lanes, nproc)  # or an error that says what is wrong with them
    size = _batch(batch, MODELS[model].batch, nproc, lanes)
    missing = [name for name in chosen if name in PEERS and find_spec(PEERS[name].package) is None]
    present = [name for name in chosen if name not in missing]
    rows = entries(present, {name: _title(name) for name in present if name in PEERS}, _lanes(size, nproc, lanes))
    task = Task(model, _device(device), size, steps or MODELS[model].steps, rounds, rows, "")
    raise typer.Exit(_bench(task, nproc, missing, as_json=as_json))


def _batch(given: int | None, usual: int, processes: int, lanes: int | None) -> int:
    """One that all can cut evenly: those with a part for each process, and lockstep into its lanes."""
    parts = math.lcm(processes, lanes_for(processes), lanes or 1)
    if given is None:
        return math.ceil(usual / parts) * parts
    if given % parts:
        raise UserError(f"--batch {given}: expected a multiple of {parts}, for {processes} processes and their lanes")
    return given


def _lanes(batch: int, processes: int, given: int | None) -> list[int]:
    """One for a process alone, as few as the processes can share, and what is usual or asked for."""
    from lockstep.data.lanes import choose_lanes

    least = lanes_for(processes)
    return sorted({1, least, given or max(least, choose_lanes(batch))})


def _title(name: str) -> str:
    from importlib import metadata

    try:
        return f"{PEERS[name].title} {metadata.version(PEERS[name].package)}"
    except metadata.PackageNotFoundError:
        return PEERS[name].title


def _device(given: str | None) -> str:
    import torch

    if given is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if given not in _DEVICES:
        raise UserError(f"--device {given[:40]}: expected {' or '.join(_DEVICES)}")
    if given == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device: use --device cpu or check nvidia-smi")
    return given


def _room(device: str) -> tuple[int, str]:
    """For how many processes there is a core or a GPU each."""
    import torch

    if device == "cuda":
        count = torch.cuda.device_count()
        return count, "GPU" if count == 1 else "GPUs"
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return cores, "core" if cores == 1 else "cores"


def _bench(task: Task, processes: int, missing: list[str], *, as_json: bool) -> int:
    """Measure, tell, and return the exit code."""
    from lockstep.benchmark.comparison import compare
    from lockstep.benchmark.verdict import judge

    if not as_json:
        for peer in (PEERS[name] for name in missing):
            print(f"{peer.title} is not installed, and so not measured (pip install {peer.package})")
    failures: dict[str, str] = {}
    with trial_folder(None, "bench") as folder:
        records = {size: measure(task, size, folder.path, failures, quiet=as_json) for size in (1, processes)}
        num_parameters = records[1].times().num_parameters
        rows = compare(task.entries, records, failures)
    verdict = judge(rows, processes, *_room(task.device))
    if as_json:
        facts = {name: getattr(task, name) for name in ("model", "device", "batch", "steps", "rounds")}
        facts |= {"processes": processes, "parameters": num_parameters, "not_installed": missing}
        told = {"verdict": verdict.lines, "promise_kept": verdict.is_kept}
        print(json.dumps({**facts, "rows": [row.as_json() for row in rows], **told}, indent=1))
    else:
        print(f"{task.model}, {num_parameters:,} parameters, batch {task.batch}, {task.device}, one thread a process")
        print("\n".join([*_table(rows, processes, task.steps), *verdict.lines]))
    return 0 if verdict.is_kept else EXIT_FAILED


def _table(rows: "Sequence[Row]", processes: int, steps: int) -> list[str]:
    from lockstep.observe.wording import table

    times = [f"{_words(size)}: a step" for size in (1, processes)]
    cells = [("", *times, f"weights after {steps} steps")]
    cells += [(row.entry.title, *(_time(row, size) for size in (1, processes)), _answer(row)) for row in rows]
    failed = [f"{row.entry.title} failed: {row.failure}" for row in rows if row.failure is not None]
    return [*table(cells), *failed]


def _time(row: "Row", size: int) -> str:
    if size not in row.times:
        return "failed" if row.failure is not None else "–"
    time = row.times[size]
    spread = "" if row.entry.name == HAND_WRITTEN else f" ({time.ratio.low:.2f}–{time.ratio.high:.2f})"
    return f"{1000 * time.step_s:.2f} ms  ×{time.ratio.median:.2f}{spread:<13}"


def _answer(row: "Row") -> str:
    if row.answer is None:
        return ""
    return "the same bits" if row.answer.is_same else f"{row.answer.difference:.2g} apart"


def _words(size: int) -> str:
    return "one process" if size == 1 else f"{size} processes"
