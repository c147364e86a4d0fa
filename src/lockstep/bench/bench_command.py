"""`lockstep bench`: time a step against other ways to train, and compare the weights of one process and of several."""

import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from lockstep.bench.bench_processes import measure
from lockstep.bench.bench_record import BenchTask
from lockstep.bench.contenders import BENCH_MODELS, CONTENDERS, HAND_WRITTEN, PEERS, fewest_lanes, make_contenders
from lockstep.command_line.output_paths import trial_folder
from lockstep.command_line.trial_runs import require_no_launcher
from lockstep.config.argument_checks import require_known
from lockstep.errors import EXIT_FAILED, UserError
from lockstep.supervision.linux_processes import available_cores
from lockstep.terminal_text import print_line

if TYPE_CHECKING:
    from lockstep.bench.step_comparison import BenchRow

_DEVICES = ("cpu", "cuda")
_MODELS = "; ".join(f"{name}: {model.description}" for name, model in BENCH_MODELS.items())


def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"The model to train. {_MODELS}.")] = "mlp",
    nproc: Annotated[
        int, typer.Option("-n", "--nproc-per-node", metavar="N", min=2, help="Processes to compare with one.")
    ] = 2,
    rounds: Annotated[int, typer.Option("--rounds", metavar="R", min=2, help="How often to time each loop.")] = 9,
    steps: Annotated[
        int | None,
        typer.Option(
            "--steps", metavar="S", min=1, help="Steps per round, and until weights are compared; default: by model."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="B", min=1, help="Samples per step, over all processes; default: by model."),
    ] = None,
    lanes: Annotated[
        int | None,
        typer.Option("--lanes", metavar="V", min=1, help="Also time lockstep with V lanes; default: 8."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="NAME,NAME…", help=f"Which of {', '.join(CONTENDERS)}; default: all."),
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", metavar="cpu|cuda", help="Default: cuda if available, else cpu.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only the results, as JSON.")] = False,
) -> None:
    """Time a step against a hand-written loop, and compare the weights of one process and of N.

    \b
    lockstep bench
    lockstep bench gpt -n 4 --rounds 20
    lockstep bench tiny --against lockstep,accelerate

    Accelerate and Fabric are included if they are installed. All loops are timed in turn, round by round; ratios are
    relative to the hand-written loop on the same number of processes. No files are left behind. Exit code 0 on
    success; 3 if lockstep failed, or if its bits differed.
    """
    from lockstep.data.lanes import share_lanes

    require_known("lockstep bench has no model", [model], list(BENCH_MODELS))
    chosen = CONTENDERS if against is None else [name.strip() for name in against.split(",")]
    if unknown := [name for name in chosen if name not in CONTENDERS]:
        raise UserError(f"--against {unknown[0][:40]}: expected names from {', '.join(CONTENDERS)}")
    require_no_launcher("bench")
    if lanes is not None:
        share_lanes(lanes, nproc)  # raises a UserError if they do not fit
    size = _batch_size(batch, BENCH_MODELS[model].batch, nproc, lanes)
    missing = [name for name in chosen if name in PEERS and find_spec(PEERS[name].package) is None]
    present = [name for name in chosen if name not in missing]
    titles = {name: _title(name) for name in present if name in PEERS}
    contenders = make_contenders(present, titles, _lane_counts(size, nproc, lanes))
    task = BenchTask(model, _device(device), size, steps or BENCH_MODELS[model].steps, rounds, contenders, "")
    raise typer.Exit(_bench(task, nproc, missing, as_json=as_json))


def _batch_size(given: int | None, default: int, processes: int, lanes: int | None) -> int:
    """Return a batch that divides evenly among the processes, and into every number of lanes that is tried."""
    divisor = math.lcm(processes, fewest_lanes(processes), lanes or 1)
    if given is None:
        return math.ceil(default / divisor) * divisor
    if given % divisor:
        raise UserError(f"--batch {given}: expected a multiple of {divisor}, for {processes} processes and their lanes")
    return given


def _lane_counts(batch: int, processes: int, given: int | None) -> list[int]:
    """Return one, the fewest that the processes can share, and the default or the number that the user asked for."""
    from lockstep.data.lanes import choose_lanes

    least = fewest_lanes(processes)
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


class _Capacity(NamedTuple):
    """The number of processes that can have a core or a GPU each."""

    processes: int
    unit: str


def _capacity(device: str) -> _Capacity:
    import torch

    if device == "cuda":
        count = torch.cuda.device_count()
        return _Capacity(count, "GPU" if count == 1 else "GPUs")
    cores = available_cores()
    return _Capacity(cores, "core" if cores == 1 else "cores")


def _bench(task: BenchTask, processes: int, missing: list[str], *, as_json: bool) -> int:
    """Measure, print the results, and return the exit code."""
    from lockstep.bench.step_comparison import compare_contenders, judge_rows

    if not as_json:
        for peer in (PEERS[name] for name in missing):
            print_line(f"{peer.title} is not installed, so it is not measured (pip install {peer.package})")
    failures: dict[str, str] = {}
    with trial_folder(None, "bench") as folder:
        records = {size: measure(task, size, folder.path, failures, quiet=as_json) for size in (1, processes)}
        num_parameters = records[1].times().num_parameters
        rows = compare_contenders(task.contenders, records, failures)
    capacity = _capacity(task.device)
    verdict = judge_rows(rows, processes, capacity.processes, capacity.unit)
    if as_json:
        values = {name: getattr(task, name) for name in ("model", "device", "batch", "steps", "rounds")}
        values |= {"processes": processes, "parameters": num_parameters, "not_installed": missing}
        values |= {"rows": [row.as_json() for row in rows]}
        values |= {"verdict": verdict.lines, "promise_kept": verdict.is_kept}
        print(json.dumps(values, indent=1))
    else:
        print_line(
            f"{task.model}, {num_parameters:,} parameters, batch {task.batch}, {task.device}, one thread a process"
        )
        print_line("\n".join([*_table(rows, processes, task.steps), *verdict.lines]))
    return 0 if verdict.is_kept else EXIT_FAILED


def _table(rows: "Sequence[BenchRow]", processes: int, steps: int) -> list[str]:
    from lockstep.observe.text_format import format_table

    cells = [("", "one process: a step", f"{processes} processes: a step", f"weights after {steps} steps")]
    cells += [(row.contender.title, _time_cell(row, 1), _time_cell(row, processes), _weights_cell(row)) for row in rows]
    failed = [f"{row.contender.title} failed: {row.failure}" for row in rows if row.failure is not None]
    return [*format_table(cells), *failed]


def _time_cell(row: "BenchRow", size: int) -> str:
    if size not in row.times:
        return "failed" if row.failure is not None else "–"
    time = row.times[size]
    spread = "" if row.contender.name == HAND_WRITTEN else f" ({time.ratio.low:.2f}–{time.ratio.high:.2f})"
    return f"{1000 * time.step_s:.2f} ms  ×{time.ratio.median:.2f}{spread:<13}"


def _weights_cell(row: "BenchRow") -> str:
    if row.weights is None:
        return ""
    return "the same bits" if row.weights.is_same else f"{row.weights.difference:.2g} apart"
