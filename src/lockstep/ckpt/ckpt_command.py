"""`lockstep ckpt`: the commands `ls`, `verify`, `audit`, `digest`, `diff` and `export`. They never change a run."""

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

from lockstep.config.plurals import count_noun
from lockstep.errors import EXIT_FAILED, UserError
from lockstep.observe.text_format import format_bytes
from lockstep.terminal_text import print_line

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.checkpoint_store import CheckpointStore
    from lockstep.ckpt.checkpoint_list import CheckpointEntry

_PROGRESS_EVERY_S = 0.1

app = typer.Typer(
    name="ckpt",
    help="List, verify, audit, compare and export checkpoints.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
RunOrCheckpoint = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder or a checkpoint folder.")]
StepOption = Annotated[
    int | None, typer.Option("--step", metavar="N", min=0, help="The checkpoint of step N; default: the newest.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls", short_help="List a run's checkpoints, newest first.")
def list_checkpoints(run: RunPath, as_json: AsJson = False) -> None:
    """List a run's checkpoints, newest first."""
    from lockstep.ckpt.checkpoint_list import checkpoint_entries

    with _reading(run):
        found = list(checkpoint_entries(_store(run)))
    if as_json:
        _print_json([{**entry._asdict(), "path": str(entry.path)} for entry in found])
        return
    rows = [("step", "size", "saved at", "processes", "metric", ""), *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command("verify", short_help="Compare every file of every checkpoint with its hash.")
def verify_checkpoints(
    run: RunOrCheckpoint,
    step: Annotated[
        int | None, typer.Option("--step", metavar="N", min=0, help="Only the checkpoint of step N.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every file of every checkpoint with its hash.

    Exit code 0: all files are intact; 3: some are damaged, and listed.
    """
    from lockstep.ckpt.checkpoint_list import check_files

    with _reading(run), _progress_line() as show:
        if step is not None or _is_checkpoint(run):
            store, only_step = _choose(run, step)
            steps = [only_step]
        else:
            store = _store(run)
            steps = store.steps()
        results = []
        for each in steps:
            result = check_files(store, each, show)
            if result is None:
                continue
            results.append(result)
            show("")
            if not as_json:
                whole = (
                    f"{result.path}: {count_noun(result.num_files, 'file')} of {format_bytes(result.num_bytes)}, intact"
                )
                print_line("\n".join(f"damaged: {line}" for line in result.problems) or whole, flush=True)
    is_intact = not any(result.problems for result in results)
    if as_json:
        shown = [{**result._asdict(), "path": str(result.path)} for result in results]
        _print_json({"ok": is_intact, "checkpoints": shown})
    _exit(is_intact)


@app.command("audit", short_help="Prove that every sample was used exactly once.")
def audit_run(run: RunPath, as_json: AsJson = False) -> None:
    """Prove that every sample of every finished epoch was used exactly once.

    Kills, restarts and a changed number of processes make no difference. The event history is also compared with what
    the checkpoints recorded of it. Epochs are counted from 1.

    Exit code 0: no faults were found; 3: faults were found, and are listed.
    """
    from lockstep.ckpt.sample_audit import audit_samples

    with _reading(run), _progress_line() as show:
        _folder(run)
        result = audit_samples(run, show)
    if as_json:
        _print_json(result.as_json())
    else:
        print_line("\n".join([str(result), *result.notes, *(f"fault: {line}" for line in result.faults)]))
    _exit(not result.faults)


@app.command("digest", short_help="Print the sha256 of everything that training changes.")
def print_digest(run: RunOrCheckpoint, step: StepOption = None, as_json: AsJson = False) -> None:
    """Print the sha256 of everything that training changes: weights, buffers, optimizer state.

    This is the digest that the run itself printed at that step. Equal digests mean equal bits.
    """
    from lockstep.engine.state_digest import digest

    with _reading(run):
        chosen = _choose(run, step)
        found = digest(_trained_state(chosen))
    if as_json:
        _print_json({"path": str(chosen.path), "step": chosen.step, "digest": found})
    else:
        print_line(found)


@app.command("diff", short_help="Show which tensors differ between two checkpoints.")
def diff_checkpoints(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run folder or a checkpoint folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another run or checkpoint folder, or the same one.")],
    step: StepOption = None,
    other_step: Annotated[
        int | None,
        typer.Option("--other-step", metavar="M", min=0, help="The checkpoint of step M of B; default: as for A."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show which tensors differ between two checkpoints, and by how much.

    Exit code 0: they are equal, bit for bit; 3: they differ.
    """
    from lockstep.ckpt.state_diff import compare_states

    with _reading(first):
        left = _choose(first, step)
        left_state = _trained_state(left)
    with _reading(second):
        if other_step is None and not _is_checkpoint(second):
            other_step = step
        right = _choose(second, other_step, "--other-step")
        right_state = _trained_state(right)
    differences = compare_states(left_state, right_state)
    num_tensors = len(left_state.keys() | right_state.keys())
    if as_json:
        shown = [difference.as_json() for difference in differences]
        sides = {"first": str(left.path), "second": str(right.path)}
        _print_json({"equal": not differences, **sides, "num_tensors": num_tensors, "differences": shown})
    else:
        for difference in differences:
            print_line(difference)
        same = f"equal in all {count_noun(num_tensors, 'tensor')}"
        differ = f"{len(differences):,} of {count_noun(num_tensors, 'tensor')} differ"
        print_line(f"{left.path} and {right.path}: {differ if differences else same}")
    _exit(not differences)


@app.command("export", short_help="Write a checkpoint's weights to one file.")
def export_checkpoint(
    run: RunOrCheckpoint,
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="FILE.safetensors, or FILE.pt.")],
    step: StepOption = None,
    best: Annotated[bool, typer.Option("--best", help="The best checkpoint, by the run's metric.")] = False,
    weights: Annotated[
        str, typer.Option("--weights", metavar="NAME", help="Which weights: model, or average (the EMA).")
    ] = "model",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace TARGET if it exists.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint's weights to one file, a plain state dict, for use without lockstep.

    \b
    lockstep ckpt export runs/mine model.safetensors --best --weights average
    """
    from lockstep.checkpoint.weights_io import export_weights

    if best and step is not None:
        raise UserError(f"--best and --step {step} both choose a checkpoint: give only one of them")
    if best and _is_checkpoint(run):
        raise UserError(f"{run} is one checkpoint: --best chooses among a run's checkpoints; omit it")
    if not overwrite and os.path.lexists(target):
        raise UserError(f"{target} exists: choose another name, or pass --overwrite")
    with _reading(run):
        source = _best(run) if best else _choose(run, step).path
    made = export_weights(source, target, weights=weights, overwrite=overwrite)
    size = made.stat().st_size
    if as_json:
        _print_json({"source": str(source), "weights": weights, "target": str(made), "num_bytes": size})
    else:
        print_line(f"{made}: {format_bytes(size)}, {weights} of {source}")


class _Chosen(NamedTuple):
    """The checkpoint that a command works on."""

    store: "CheckpointStore"
    step: int

    @property
    def path(self) -> Path:
        return self.store.path(self.step)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn an OSError into a line for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot read {error.filename or path}: {error.strerror or error}") from None


@contextmanager
def _progress_line() -> Iterator[Callable[[str], None]]:
    """Show a line of progress on a terminal, removed at the end; show nothing without one."""
    shown_at = 0.0

    def show(text: str) -> None:
        nonlocal shown_at
        now = time.monotonic()
        if sys.stderr.isatty() and (not text or now - shown_at > _PROGRESS_EVERY_S):
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write("\r\x1b[K")
            print_line(text[:width], end="", file=sys.stderr, flush=True)
            shown_at = now

    try:
        yield show
    finally:
        show("")


def _folder(path: Path) -> Path:
    """Return `path`; raise a `UserError` if it is not a folder."""
    if not path.is_dir():
        raise UserError(f"{path} is not a folder: expected a run folder, such as runs/digits")
    return path


def _is_checkpoint(path: Path) -> bool:
    """Is it a single checkpoint's folder?"""
    return (path / "manifest.json").exists() or _step_of(path) is not None


def _step_of(path: Path) -> int | None:
    """Return the step of a checkpoint's folder, from its name; None if it is not one."""
    from lockstep.checkpoint.checkpoint_store import CheckpointStore

    if (path / "checkpoints").is_dir():
        return None
    own = path.resolve()
    store = CheckpointStore(own.parent)
    return next((step for step in store.steps() if store.path(step) == own), None)


def _store(run: Path) -> "CheckpointStore":
    """Return a run folder's checkpoints; raise a `UserError` if there are none."""
    from lockstep.checkpoint.checkpoint_store import CheckpointStore

    inner = _folder(run) / "checkpoints"
    store = CheckpointStore(inner if inner.is_dir() else run)
    if not store.steps():
        if _is_checkpoint(run):
            raise UserError(f"{run} is one checkpoint: expected a run folder")
        raise UserError(f"{run} has no checkpoints: expected a run folder with at least one")
    return store


def _choose(path: Path, step: int | None, option: str = "--step") -> _Chosen:
    """Return the checkpoint that `path` and `step` select: the folder itself, a run's newest, or that of a step."""
    from lockstep.checkpoint.checkpoint_store import CheckpointStore

    if _is_checkpoint(_folder(path)):
        own = _step_of(path)
        if own is None:
            raise UserError(f"{path} is a checkpoint that was renamed: rename it back to step-N")
        if step not in (None, own):
            raise UserError(f"{option} {step}: {path} is the checkpoint of step {own}")
        return _Chosen(CheckpointStore(path.resolve().parent), own)
    store = _store(path)
    steps = store.steps()
    if step is not None and step not in steps:
        raise UserError(f"{option} {step}: {path} has checkpoints of steps {', '.join(map(str, steps))}")
    return _Chosen(store, steps[0] if step is None else step)


def _best(run: Path) -> Path:
    store = _store(run)
    step = store.best()
    if step is None:
        raise UserError(f"{run} has no best checkpoint: set `best` in the config to the metric that decides")
    return store.path(step)


def _trained_state(chosen: _Chosen) -> "Mapping[str, Tensor]":
    from lockstep.checkpoint.checkpoint_contents import trained_state
    from lockstep.checkpoint.manifest import CheckpointError

    checkpoint = chosen.store.load(chosen.step)
    try:
        return trained_state(checkpoint.values)
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError, OverflowError):
        raise CheckpointError(f"{chosen.path}: does not contain the state of a run") from None


def _row(entry: "CheckpointEntry") -> tuple[str, ...]:
    from lockstep.checkpoint.ledger import printable_value

    if entry.problem is not None:
        return (str(entry.step), "", "", "", "", f"damaged: {entry.problem}")
    marks = [name for name, is_so in (("latest", entry.is_latest), ("best", entry.is_best)) if is_so]
    numbers = ((name, value) for name, value in (entry.metrics or {}).items() if type(value) in (int, float))
    metric = next((f"{printable_value(name)} {value:.6g}" for name, value in numbers), "")
    processes = "" if entry.processes is None else str(entry.processes)
    saved_at = "" if entry.saved_at is None else printable_value(entry.saved_at)
    return (str(entry.step), format_bytes(entry.num_bytes), saved_at, processes, metric, ", ".join(marks))


def _print_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    from lockstep.events.event_log import json_safe

    print(json.dumps(json_safe(value), indent=1, allow_nan=False))


def _exit(is_ok: bool) -> None:
    if not is_ok:
        raise typer.Exit(EXIT_FAILED)
