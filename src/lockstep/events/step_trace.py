"""Traces: digests of every step's tensors, compared to find where two runs diverge.

A trace has one line for each step: {"step": 1, "phases": {"data": {"lane 0": digest, …}, "loss": {…}, …}}.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import UserError
from lockstep.events.jsonl import read_jsonl

TRACE_PHASES = ("data", "loss", "gradient", "state")  # of a step, in the order in which they are computed

Phases = dict[str, dict[str, str]]  # for each phase, the digest of each tensor


class TraceDifference(NamedTuple):
    """The first step at which two runs differ, the first phase that differs in it, and the first tensor in that."""

    step: int
    phase: str
    tensor: str  # or the lane
    num_tensors: int  # how many differ in that phase

    def __str__(self) -> str:
        others = f" (and {self.num_tensors - 1} more)" if self.num_tensors > 1 else ""
        return f"step {self.step}, {self.phase}: {self.tensor}{others}"


def first_difference(
    left: str | Path, right: str | Path, phases: Sequence[str] | None = None
) -> TraceDifference | None:
    """The first difference between two traces; None if they agree in all steps and phases that both have.

    Args:
        left: a trace, such as `runs/a/digests.jsonl`, which a run with `trace=True` writes.
        right: the trace to compare it with.
        phases: the phases of a step in order; by default those of lockstep's own traces.
    """
    ours, theirs = read_trace(Path(left)), read_trace(Path(right))
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise UserError(f"{left} and {right} have no step in common")
    for step in common:
        for phase in phases or TRACE_PHASES:
            if phase in ours[step] and phase in theirs[step]:
                own, other = ours[step][phase], theirs[step][phase]
                names = dict.fromkeys([*own, *other])
                differing = [name for name in names if own.get(name) != other.get(name)]
                if differing:
                    return TraceDifference(step, phase, differing[0], len(differing))
    return None


def read_trace(path: Path) -> dict[int, dict[str, dict[str, Any]]]:
    """The phases of each step; for a step that was repeated after a restart, the last ones."""
    if not path.exists():
        raise UserError(f"{path}: no such trace; run with trace=True to write one")
    steps = {}
    for line in read_jsonl(path, follow_links=True):
        # Traces of an earlier format have only the state, as "tensors".
        phases = line.get("phases", {"state": line.get("tensors")})
        if isinstance(line.get("step"), int) and isinstance(phases, dict):
            steps[line["step"]] = {phase: names for phase, names in phases.items() if isinstance(names, dict)}
    return steps
