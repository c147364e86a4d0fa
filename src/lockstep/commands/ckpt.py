"""`lockstep ckpt`: look at a run's checkpoints, check them, compare them, take weights out. It never changes a run."""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from lockstep.errors import EXIT_FAILED, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.catalogue import Entry
    from lockstep.checkpoint.store import Store

_PROGRESS_EVERY_S = 0.1

app = typer.Typer(
    name="ckpt",
    help="List, verify, audit, compare and export checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
RunOrCheckpoint = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or a checkpoint's.")]
StepOption = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="The checkpoint of step N; default: the newest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls")
def list_checkpoints(run: RunPath, as_json: AsJson = False) -> None:
    """List a run's checkpoints, the newest first."""
    from lockstep.checkpoint.catalogue import entries

    with _reading(run):
        found = list(entries(_store(run)))
    if as_json:
        _print_json([{**entry._asdict(), "path": str(entry.path)} for entry in found])
        return
    rows = [("step", "size", "saved at", "processes", "metric", ""), *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command()
def verify(
    run: RunOrCheckpoint,
    step: Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="That one alone.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every file of every checkpoint with its hash.

    Exit code 0: all are as they were written; 3: something is damaged, and named.
    """
    from lockstep.checkpoint.catalogue import examine

    with _reading(run), _progress() as tell:
        one = _one(run, step) if step is not None or _is_checkpoint(run) else None
        store, steps = (_store(run), None) if one is None else (one.store, [one.step])
        checkups = []
        for each in steps or store.steps():
            checkup = examine(store, each, tell)
            if checkup is None:
                continue
            checkups.append(checkup)
            tell("")
            if not as_json:
                whole = f"{checkup.path}: {_count(checkup.num_files, 'file')} of {_size(checkup.num_bytes)}, intact"
                print("\n".join(f"damaged: {line}" for line in checkup.problems) or whole, flush=True)
    is_intact = not any(checkup.problems for checkup in checkups)
    if as_json:
        shown = [{**checkup._asdict(), "path": str(checkup.path)} for checkup in checkups]
        _print_json({"ok": is_intact, "checkpoints": shown})
    _end(is_intact)


@app.command("audit")
def audit_run(run: RunPath, as_json: AsJson = False) -> None:
    """Prove that every sample of every finished epoch was used exactly once.

    Kills, restarts and other numbers of processes make no difference. The event history is compared with what the
    checkpoints remember of it. Epochs are counted from 1.

    Exit code 0: so it is; 3: it is not, and what is wrong is named.
    """
    from lockstep.checkpoint.audit import audit

    with _reading(run), _progress() as tell:
        _folder(run)
        result = audit(run, tell)
    if as_json:
        _print_json(result.as_json())
    else:
        print("\n".join([str(result), *result.notes, *(f"fault: {line}" for line in result.faults)]))
    _end(not result.faults)


@app.command()
def digest(run: RunOrCheckpoint, step: StepOption = None, as_json: AsJson = False) -> None:
    """Print the sha256 of all that training has changed: weights, buffers, optimizer state.

    It is the digest that the run printed itself at that step. Equal digests, equal bits.
    """
    from lockstep.engine.digest import digest as digest_of

    with _reading(run):
        chosen = _one(run, step)
        found = digest_of(_state(chosen))
    if as_json:
        _print_json({"path": str(chosen.path), "step": chosen.step, "digest": found})
    else:
        print(found)


@app.command()
def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run folder, or a checkpoint's.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another, or the same.")],
    step: StepOption = None,
    other_step: Annotated[
        int | None, typer.Option("--other-step", metavar="M", min=0, help="The same for B; default: as for A.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which tensors differ between two checkpoints, and by how much.

    Exit code 0: they are equal, bit for bit; 3: they differ.
    """
    from lockstep.checkpoint.comparison import compare

    with _reading(first):
        left = _one(first, step)
        left_state = _state(left)
    with _reading(second):
        if other_step is None and not _is_checkpoint(second):
            other_step = step
        right = _one(second, other_step, "--other-step")
        right_state = _state(right)
    differences = compare(left_state, right_state)
    num_tensors = len(left_state.keys() | right_state.keys())
    if as_json:
        shown = [difference.as_json() for difference in differences]
        sides = {"first": str(left.path), "second": str(right.path)}
        _print_json({"equal": not differences, **sides, "num_tensors": num_tensors, "differences": shown})
    else:
        for text in map(str, differences):
            print(text if text.isprintable() else ascii(text))  # a tensor's name may be a stranger's
        same = f"equal in all {_count(num_tensors, 'tensor')}"
        differ = f"{len(differences):,} of {_count(num_tensors, 'tensor')} differ"
        print(f"{left.path} and {right.path}: {differ if differences else same}")
    _end(not differences)


@app.command()
def export(
    run: RunOrCheckpoint,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="FILE.safetensors, or FILE.pt.")],
    step: StepOption = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint by the run's metric.")] = False,
    weights: Annotated[
        str, typer.Option("--weights", metavar="NAME", help="average: the moving average of the weights.")
    ] = "model",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it is there.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights as one file, a plain state dict, for use without lockstep.

    \b
    lockstep ckpt export runs/mine model.safetensors --best --weights average
    """
    from lockstep.checkpoint.exchange import export_weights

    if best and step is not None:
        raise UserError(f"--best and --step {step} each choose a checkpoint: give one of them")
    if best and _is_checkpoint(run):
        raise UserError(f"{run} is one checkpoint: --best chooses among those of a run folder")
    if not overwrite and os.path.lexists(target):
        raise UserError(f"{target} exists: choose another name, or --overwrite")
    with _reading(run):
        source = _best(run) if best else _one(run, step).path
    made = export_weights(source, target, weights=weights, overwrite=overwrite)
    size = made.stat().st_size
    if as_json:
        _print_json({"source": str(source), "weights": weights, "target": str(made), "num_bytes": size})
    else:
        print(f"{made}: {_size(size)}, {weights} of {source}")


class _Chosen(NamedTuple):
    store: "Store"
    step: int

    @property
    def path(self) -> Path:
        return self.store.path(self.step)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What the system says about a folder is the user's to put right."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror or error}") from None


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line on the terminal that says what is being done, and is gone afterwards; elsewhere nothing."""
    shown_at = 0.0

    def tell(text: str) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if sys.stderr.isatty() and (not text or now - shown_at > _PROGRESS_EVERY_S):
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)
            shown_at = now

    try:
        yield tell
    finally:
        tell("")


def _folder(path: Path) -> Path:
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: expected a run's, as in runs/digits")
    return path


def _is_checkpoint(path: Path) -> bool:
    """Is it a single checkpoint's folder?"""
    return (path / "manifest.json").exists() or _step_of(path) is not None


def _step_of(path: Path) -> int | None:
    """The step of a checkpoint's folder, by its name."""
    from lockstep.checkpoint.store import Store

    if (path / "checkpoints").is_dir():
        return None
    own = path.resolve()
    store = Store(own.parent)
    return next((step for step in store.steps() if store.path(step) == own), None)


def _store(run: Path) -> "Store":
    """A run folder's checkpoints; at least one."""
    from lockstep.checkpoint.store import Store

    inner = _folder(run) / "checkpoints"
    store = Store(inner if inner.is_dir() else run)
    if not store.steps():
        if _is_checkpoint(run):
            raise UserError(f"{run} is one checkpoint: expected a run folder")
        raise UserError(f"{run} has no checkpoints: expected a run folder in which something was saved")
    return store


def _one(path: Path, step: int | None, option: str = "--step") -> _Chosen:
    """The checkpoint that is meant: the folder itself, or of a run folder the newest, or that of a step."""
    from lockstep.checkpoint.store import Store

    if _is_checkpoint(_folder(path)):
        own = _step_of(path)
        if own is None:
            raise UserError(f"{path} is a checkpoint under another name: rename it to step-N, as it was")
        if step not in (None, own):
            raise UserError(f"{option} {step}: {path} is the checkpoint of step {own}")
        return _Chosen(Store(path.resolve().parent), own)
    store = _store(path)
    steps = store.steps()
    if step is not None and step not in steps:
        raise UserError(f"{option} {step}: {path} has checkpoints of {', '.join(map(str, steps))}")
    return _Chosen(store, steps[0] if step is None else step)


def _best(run: Path) -> Path:
    store = _store(run)
    step = store.best()
    if step is None:
        raise UserError(f"{run} has no best checkpoint: the config's `best` says by which metric")
    return store.path(step)


def _state(chosen: _Chosen) -> "Mapping[str, Tensor]":
    from lockstep.checkpoint.contents import state_in
    from lockstep.checkpoint.manifest import CheckpointError

    checkpoint = chosen.store.load(chosen.step)
    try:
        return state_in(checkpoint.values)
    except (KeyError, TypeError, AttributeError, ValueError):
        raise CheckpointError(f"{chosen.path}: does not hold what a run saves") from None


def _row(entry: "Entry") -> tuple[str, ...]:
    from lockstep.checkpoint.lineage import shown

    if entry.problem is not None:
        return (str(entry.step), "", "", "", "", f"damaged: {entry.problem}")
    marks = [name for name, is_so in (("latest", entry.is_latest), ("best", entry.is_best)) if is_so]
    numbers = ((name, value) for name, value in (entry.metrics or {}).items() if type(value) in (int, float))
    metric = next((f"{shown(name)} {value:.6g}" for name, value in numbers), "")
    processes = "" if entry.processes is None else str(entry.processes)
    saved_at = "" if entry.saved_at is None else shown(entry.saved_at)
    return (str(entry.step), _size(entry.num_bytes), saved_at, processes, metric, ", ".join(marks))


def _size(num_bytes: int) -> str:
    size, units = float(num_bytes), iter(("kB", "MB", "GB", "TB"))
    unit = "bytes"
    while size >= 1000 and unit != "TB":
        size, unit = size / 1000, next(units)
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"


def _count(num: int, noun: str) -> str:
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"


def _print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    from lockstep.events.event import plain

    print(json.dumps(plain(value), indent=1, allow_nan=False))


def _end(is_right: bool) -> None:
    if not is_right:
        raise typer.Exit(EXIT_FAILED)
