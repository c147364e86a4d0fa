"""Where do two runs part? How traces are read, and the first step, phase and tensor at which two of them differ.

A trace has one line for each step: {"step": 1, "phases": {"data": {"lane 0": digest, …}, "loss": {…}, …}}.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import UserError
from lockstep.events.jsonl import read_lines

PHASES = ("data", "loss", "gradient", "state")  # of a step, in the order in which one follows from another

Phases = dict[str, dict[str, str]]  # for each phase, what stands for the bits of each tensor


class Difference(NamedTuple):
    """The first step at which two runs differ, the first phase of it that does, and the first tensor in that."""

    step: int
    phase: str
    tensor: str  # or lane
    num_tensors: int  # that differ in that phase

    def __str__(self) -> str:
        others = f" (and {self.num_tensors - 1} more)" if self.num_tensors > 1 else ""
        return f"step {self.step}, {self.phase}: {self.tensor}{others}"


def first_difference(left: str | Path, right: str | Path, phases: Sequence[str] | None = None) -> Difference | None:
    """Compare two traces over the steps and phases that both have; None where they agree in all of them.

    `phases`: of a step, in order; if left out, those of lockstep's own traces.
    """
    ours, theirs = read_trace(Path(left)), read_trace(Path(right))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise UserError(f"{left} and {right} have no step in common")
    for step in common:
        for phase in phases or PHASES:
            if phase in ours[step] and phase in theirs[step]:
                own, other = ours[step][phase], theirs[step][phase]
                names = dict.fromkeys([*own, *other])
                differing = [name for name in names if own.get(name) != other.get(name)]
                if differing:
                    return Difference(step, phase, differing[0], len(differing))
    return None


def read_trace(path: Path) -> dict[int, dict[str, dict[str, Any]]]:
    """Each step's phases; after a restart steps repeat, and the last counts."""
    if not path.exists():
        raise UserError(f"there is no trace at {path}: run with trace=True")
    steps = {}
    for line in read_lines(path):
        # Before there were phases, a line had the state alone, as "tensors".
        phases = line.get("phases", {"state": line.get("tensors")})
        if isinstance(line.get("step"), int) and isinstance(phases, dict):
            steps[line["step"]] = {phase: names for phase, names in phases.items() if isinstance(names, dict)}
    return steps
