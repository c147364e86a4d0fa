"""The checklist of a distributed training, each line checked, with what shows it; or not checked, with the reason."""

import json
import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.events.jsonl import read_lines
from lockstep.supervision.rank_files import FOLDER_PREFIX
from lockstep.supervision.witness import WitnessFiles

_MOST_SHOWN = 3
# Torch's own, from every process, on the way to its peers.
_NOT_THE_SCRIPTS = (b"[Gloo] ", b"NCCL version ")
# What every rank of a run writes into its folder, in a file of its own: by what a part of its path is.
_EACH_RANKS_OWN = {
    re.compile("ranks"): "its own log",
    re.compile("evaluations"): "the designs that it has evaluated",
    re.compile(r"\.draft-.*"): "its part of a checkpoint, which rank 0 commits",  # by renaming it
}
_NOBODYS_BUSINESS = ("/proc", "/dev", "/sys")


class Check(NamedTuple):
    what: str
    holds: bool | None  # None: it was not checked
    evidence: str
    is_promise: bool = False  # lockstep's own: broken, it is a failure

    def __str__(self) -> str:
        box = {True: "[x]", False: "[!]", None: "[ ]"}[self.holds]
        return f"{box} {self.what}: {'not checked: ' if self.holds is None else ''}{self.evidence}"

    def as_json(self) -> dict[str, Any]:
        return {"what": self.what, "holds": self.holds, "evidence": self.evidence}


def only_rank_0_printed(witnesses: Sequence[WitnessFiles]) -> Check:
    """By what came out of each rank's standard output."""
    counts = [_num_lines(files.output) for files in witnesses]
    others = [f"rank {rank} printed {counted(count, 'line')}" for rank, count in enumerate(counts) if rank and count]
    if not any(counts):
        return Check("only rank 0 prints", None, "nothing was printed")
    evidence = f"rank 0 printed {counted(counts[0], 'line')}, {_others(len(counts))} nothing"
    return Check("only rank 0 prints", not others, _some(others) or evidence)


def only_rank_0_wrote(witnesses: Sequence[WitnessFiles], trial: Path, here: Path) -> Check:
    """By what each rank has opened for writing, in `trial`, in the working folder `here`, or anywhere that is kept."""
    written = [_written(files, trial, here) for files in witnesses]
    others = [
        f"rank {rank} wrote {_shown(path, trial, here)}"
        for rank, paths in enumerate(written)
        for path in paths
        if rank and _its_own(path, trial) is None
    ]
    what = "only rank 0 creates checkpoints and results"
    if not others and not written[0]:
        return Check(what, None, "nothing was written")
    own = sorted({_its_own(path, trial) or "" for paths in written[1:] for path in paths})
    rest = f"nothing but {' and '.join(own)}" if own else "nothing"
    evidence = f"rank 0 wrote {counted(len(written[0]), 'file')}, {_others(len(written))} {rest}"
    return Check(what, not others, _some(others) or evidence)


def metrics_agree(one: Sequence[Path], many: Sequence[Path], losses: Sequence[tuple[str, str]]) -> Check:
    """By the evaluations in their runs' event files, and the losses of each step; of one process and of several."""
    what = "metrics are the same on one process and on several"
    left, right = _evaluations(one), _evaluations(many)
    different = [
        f"step {place[1]}: {left.get(place)} and {right.get(place)}"
        for place in left | right
        if left.get(place) != right.get(place)
    ]
    different += [f"loss {ours} and {theirs}" for ours, theirs in losses if ours != theirs]
    if different:
        return Check(what, False, _some(different))
    shown = [f"the loss of {counted(len(losses), 'step')}"] if losses else []
    if left:
        place, metrics = list(left.items())[-1]
        numbers = {name: value for name, value in metrics.items() if isinstance(value, float)}
        values = ", ".join(f"{name} {value:.6g}" for name, value in list(numbers.items())[:_MOST_SHOWN])
        shown.append(f"{values or 'metrics'} after step {place[1]}")
    return Check(what, True if shown else None, ", ".join(shown) or "none were recorded")


def _evaluations(runs: Sequence[Path]) -> dict[tuple[int, int], dict[str, Any]]:
    """By run and step."""
    return {
        (number, event["step"]): event["metrics"]
        for number, events in enumerate(runs)
        if events.exists()
        for event in read_lines(events)
        if event.get("kind") == "eval"
    }


def _num_lines(output: Path) -> int:
    with suppress(FileNotFoundError), output.open("rb") as file:
        return sum(1 for line in file if line.strip() and not line.startswith(_NOT_THE_SCRIPTS))
    return 0


def _written(files: WitnessFiles, trial: Path, here: Path) -> list[Path]:
    with suppress(FileNotFoundError):
        paths = [Path(json.loads(line)) for line in files.written.read_text().splitlines()]
        return [path for path in paths if _counts(path, files.folder, trial, here)]
    return []


def _counts(path: Path, witness: Path, trial: Path, here: Path) -> bool:
    is_ours = path.is_relative_to(witness.resolve()) or any(part.startswith(FOLDER_PREFIX) for part in path.parts)
    if is_ours or "__pycache__" in path.parts:
        return False
    if path.is_relative_to(trial.resolve()) or path.is_relative_to(here):
        return True
    passing = (tempfile.gettempdir(), Path.home() / ".cache", Path.home() / ".config", *_NOBODYS_BUSINESS)
    return not any(path.is_relative_to(folder) for folder in passing)


def _its_own(path: Path, trial: Path) -> str | None:
    """What a file of a rank's own holds; None for any other file."""
    inside = path.relative_to(trial.resolve()).parts if path.is_relative_to(trial.resolve()) else ()
    kinds = (kind for name in inside for part, kind in _EACH_RANKS_OWN.items() if part.fullmatch(name))
    return next(kinds, None)


def _shown(path: Path, trial: Path, here: Path) -> str:
    for folder in (trial.resolve(), here):
        if path.is_relative_to(folder):
            return str(path.relative_to(folder))
    return str(path)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _others(num_ranks: int) -> str:
    return "rank 1" if num_ranks == 2 else f"each of the other {num_ranks - 1}"


def _some(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _MOST_SHOWN} more" if len(lines) > _MOST_SHOWN else ""
    return "; ".join(lines[:_MOST_SHOWN]) + more
