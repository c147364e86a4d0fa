"""The checklist of `lockstep verify`, with evidence: who prints, who writes, and whether metrics agree."""

import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.plurals import count_noun
from lockstep.events.jsonl import read_jsonl
from lockstep.supervision.agent_folder import FOLDER_PREFIX
from lockstep.supervision.io_recorder import OutputRecord

_MOST_SHOWN = 3
# Printed by torch itself, in every process, while it connects.
_TORCH_OUTPUT = (b"[Gloo] ", b"NCCL version ")
# What each rank may write into the run folder, by a component of the path.
_RANK_FILES = {
    re.compile("ranks"): "its own log",
    re.compile("evaluations"): "the designs that it evaluated",
    re.compile(r"\.draft-.*"): "its part of a checkpoint, which rank 0 commits",  # by renaming it
}
_SYSTEM_FOLDERS = ("/proc", "/dev", "/sys")


class ChecklistItem(NamedTuple):
    """A line of the checklist."""

    what: str
    holds: bool | None  # None: not checked
    evidence: str
    is_promise: bool = False  # promised by lockstep: if it does not hold, verify fails

    def __str__(self) -> str:
        box = {True: "[x]", False: "[!]", None: "[ ]"}[self.holds]
        return f"{box} {self.what}: {'not checked: ' if self.holds is None else ''}{self.evidence}"

    def as_json(self) -> dict[str, Any]:
        return {"what": self.what, "holds": self.holds, "evidence": self.evidence}


def check_who_printed(records: Sequence[OutputRecord]) -> ChecklistItem:
    """Check that only rank 0 prints, by each rank's standard output."""
    counts = [_num_lines(files.output) for files in records]
    others = [f"rank {rank} printed {count_noun(count, 'line')}" for rank, count in enumerate(counts) if rank and count]
    if not any(counts):
        return ChecklistItem("only rank 0 prints", None, "nothing was printed")
    evidence = f"rank 0 printed {count_noun(counts[0], 'line')}, {_others(len(counts))} nothing"
    return ChecklistItem("only rank 0 prints", not others, _some(others) or evidence)


def check_who_wrote(records: Sequence[OutputRecord], trial: Path, here: Path) -> ChecklistItem:
    """Check that only rank 0 writes files, by what each rank opened for writing.

    Args:
        records: the records of all ranks.
        trial: the folder of the verification.
        here: the working directory.

    Temporary files, caches and system files do not count.
    """
    written = [_written(files, trial, here) for files in records]
    others = [
        f"rank {rank} wrote {_shown(path, trial, here)}"
        for rank, paths in enumerate(written)
        for path in paths
        if rank and _kind_of_rank_file(path, trial) is None
    ]
    what = "only rank 0 creates checkpoints and results"
    if not others and not written[0]:
        return ChecklistItem(what, None, "nothing was written")
    own = sorted({_kind_of_rank_file(path, trial) or "" for paths in written[1:] for path in paths})
    rest = f"nothing but {' and '.join(own)}" if own else "nothing"
    evidence = f"rank 0 wrote {count_noun(len(written[0]), 'file')}, {_others(len(written))} {rest}"
    return ChecklistItem(what, not others, _some(others) or evidence)


def check_metrics(one: Sequence[Path], many: Sequence[Path], losses: Sequence[tuple[str, str]]) -> ChecklistItem:
    """Check that metrics and losses are equal on one process and on several.

    Args:
        one: the event files of the runs on one process.
        many: the event files of the same runs on several processes.
        losses: for each step, the loss on one process and on several.
    """
    what = "metrics are the same on one process and on several"
    left, right = _evaluations(one), _evaluations(many)
    different = [
        f"step {files[1]}: {left.get(files)} and {right.get(files)}"
        for files in left | right
        if left.get(files) != right.get(files)
    ]
    different += [f"loss {ours} and {theirs}" for ours, theirs in losses if ours != theirs]
    if different:
        return ChecklistItem(what, False, _some(different))
    shown = [f"the loss of {count_noun(len(losses), 'step')}"] if losses else []
    if left:
        files, metrics = list(left.items())[-1]
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        values = ", ".join(f"{name} {value:.6g}" for name, value in list(numbers.items())[:_MOST_SHOWN])
        shown.append(f"{values or 'metrics'} after step {files[1]}")
    return ChecklistItem(what, True if shown else None, ", ".join(shown) or "none were recorded")


def _evaluations(runs: Sequence[Path]) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the metrics by run and step."""
    return {
        (number, event["step"]): event["metrics"]
        for number, events in enumerate(runs)
        if events.exists()
        for event in read_jsonl(events)
        if event.get("kind") == "eval"
    }


def _num_lines(output: Path) -> int:
    with suppress(FileNotFoundError), output.open("rb") as file:
        return sum(1 for line in file if line.strip() and not line.startswith(_TORCH_OUTPUT))
    return 0


def _written(files: OutputRecord, trial: Path, here: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        paths = [Path(json.loads(line)) for line in files.written.read_text().splitlines()]
        return [path for path in paths if _is_relevant(path, files.folder, trial, here)]
    return []


def _is_relevant(path: Path, record_folder: Path, trial: Path, here: Path) -> bool:
    is_ours = path.is_relative_to(record_folder.resolve()) or any(part.startswith(FOLDER_PREFIX) for part in path.parts)
    if is_ours or "__pycache__" in path.parts:
        return False
    if path.is_relative_to(trial.resolve()) or path.is_relative_to(here):
        return True
    ignored = (tempfile.gettempdir(), Path.home() / ".cache", Path.home() / ".config", *_SYSTEM_FOLDERS)
    return not any(path.is_relative_to(folder) for folder in ignored)


def _kind_of_rank_file(path: Path, trial: Path) -> str | None:
    """Return what a file that every rank may write holds; None for any other file."""
    inside = path.relative_to(trial.resolve()).parts if path.is_relative_to(trial.resolve()) else ()
    kinds = (kind for name in inside for part, kind in _RANK_FILES.items() if part.fullmatch(name))
    return next(kinds, None)


def _shown(path: Path, trial: Path, here: Path) -> str:
    for folder in (trial.resolve(), here):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return str(path)


def _others(num_ranks: int) -> str:
    return "rank 1" if num_ranks == 2 else f"each of the other {num_ranks - 1}"


def _some(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _MOST_SHOWN} more" if len(lines) > _MOST_SHOWN else ""
    return "; ".join(lines[:_MOST_SHOWN]) + more
