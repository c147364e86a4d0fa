"""Where do two runs part? Each step's digests, tensor by tensor, and the first at which two traces differ."""

from pathlib import Path
from typing import Any, NamedTuple

from lockstep.engine.digest import State, tensor_digests
from lockstep.errors import UserError
from lockstep.events.jsonl import JsonLines, read_lines

# 64 bits are plenty to tell two tensors apart, and a trace has a line for every step.
_DIGITS = 16


class Difference(NamedTuple):
    """The first step after which two runs differ, and the first tensor that does, in the model's own order."""

    step: int
    tensor: str
    num_tensors: int  # that differ after that step

    def __str__(self) -> str:
        others = f" (and {self.num_tensors - 1} more)" if self.num_tensors > 1 else ""
        return f"step {self.step}: {self.tensor}{others}"


class DigestTrace:
    """Writes a trace: one line a step."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def record(self, step: int, state: State) -> None:
        digests = tensor_digests(state)
        self._lines.emit({"step": step, "tensors": {name: digests[name][:_DIGITS] for name in state}})

    def close(self) -> None:
        self._lines.close()


def first_difference(left: str | Path, right: str | Path) -> Difference | None:
    """Compare two traces over the steps that both have; None where they agree in all of them."""
    ours, theirs = _read(Path(left)), _read(Path(right))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise UserError(f"{left} and {right} have no step in common")
    for step in common:
        names = [*ours[step], *(name for name in theirs[step] if name not in ours[step])]
        differing = [name for name in names if ours[step].get(name) != theirs[step].get(name)]
        if differing:
            return Difference(step, differing[0], len(differing))
    return None


def _read(path: Path) -> dict[int, dict[str, Any]]:
    """Each step's digests; after a restart steps repeat, and the last counts."""
    if not path.exists():
        raise UserError(f"there is no trace at {path}: run with trace=True")
    steps = {}
    for line in read_lines(path):
        if isinstance(line.get("step"), int) and isinstance(line.get("tensors"), dict):
            steps[line["step"]] = line["tensors"]
    return steps
