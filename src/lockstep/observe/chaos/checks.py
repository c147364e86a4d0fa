"""Was anything lost? A run that was attacked against one that was left alone, by what stands in their folders."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import environment
from lockstep.config.json_text import parse_json
from lockstep.events.jsonl import read_lines
from lockstep.events.run_folder import RunFolder
from lockstep.events.trace import PHASES

_MOST_FAULTS = 5  # of one check that are told

Step = Mapping[str, Mapping[str, str]]  # its phases, and what stands for the bits of each tensor


class Check(NamedTuple):
    name: str
    faults: tuple[str, ...] = ()

    @property
    def is_passed(self) -> bool:
        return not self.faults

    def __str__(self) -> str:
        if self.is_passed:
            return f"ok    {self.name}"
        more = [f"      and {len(self.faults) - _MOST_FAULTS} more"] if len(self.faults) > _MOST_FAULTS else []
        return "\n".join([f"FAULT {self.name}", *(f"      {fault}" for fault in self.faults[:_MOST_FAULTS]), *more])


def check_run(reference: RunFolder, attacked: RunFolder) -> list[Check]:
    searched = [check_designs(reference, attacked)] if reference.evaluations.exists() else []
    return [
        check_end(reference, attacked),
        check_steps(reference, attacked),
        check_resumes(attacked),
        check_evaluations(reference, attacked),
        *searched,
    ]


def check_end(reference: RunFolder, attacked: RunFolder) -> Check:
    name = "the run has ended with the digest of one that was left alone"
    expected, found = read_end(reference), read_end(attacked)
    if found is None:
        return Check(name, ("it says nothing of its end",))
    if expected is None or (expected["step"], expected["digest"]) != (found["step"], found["digest"]):
        return Check(name, (f"expected {_shown(expected)}, found {_shown(found)}",))
    return Check(name)


def check_steps(reference: RunFolder, attacked: RunFolder) -> Check:
    """Also of the attempts that were undone: what they saw and computed must be the same."""
    expected = dict(read_trace(reference.trace))
    faults = []
    seen = set()
    for step, phases in read_trace(attacked.trace):
        seen.add(step)
        if step not in expected:
            faults.append(f"step {step}: a step that the run left alone has not made")
            continue
        differing = next((phase for phase in PHASES if phases.get(phase) != expected[step].get(phase)), None)
        if differing is not None:
            faults.append(f"step {step}: other {differing} than in the run left alone")
    faults += [f"step {step} was never made" for step in sorted(expected.keys() - seen)]
    return Check("every step of every attempt had the same samples, loss, gradient and state", tuple(faults))


def check_resumes(attacked: RunFolder) -> Check:
    """Where the steps go back, an attempt must have begun, and said that it goes on from just there."""
    name = "every attempt has gone on exactly where its state was, without a gap"
    starts = iter([event for event in _lines(attacked.events) if event.get("kind") == "start"])
    faults = []
    before = None
    for step, _ in read_trace(attacked.trace):
        if before is None or step != before + 1:
            # Starts that made no step, or went on with the very next, leave no break.
            if not any(event.get("step") == step - 1 for event in starts):
                faults.append(f"after step {before or 0} came step {step}, and no attempt has begun there")
                break
            if before is not None and step > before + 1:
                faults.append(f"after step {before} came step {step}: the steps between are missing")
        before = step
    return Check(name, tuple(faults))


def check_evaluations(reference: RunFolder, attacked: RunFolder) -> Check:
    name = "the evaluations are the same, each once"
    if read_json(reference.history) == read_json(attacked.history):
        return Check(name)
    return Check(name, (f"{attacked.history} is not as {reference.history}",))


def check_designs(reference: RunFolder, attacked: RunFolder) -> Check:
    """Of a search: what was under way when a rank was killed may be evaluated again, but nothing that was finished."""
    name = "the same designs were evaluated, and none again that was finished"
    expected, found = (
        Counter(line.get("key") for path in sorted(run.evaluations.glob("*.jsonl")) for line in _lines(path))
        for run in (reference, attacked)
    )
    faults = [f"{key} was evaluated {count} times" for key, count in found.items() if count > 1]
    faults += [f"{key} was never evaluated" for key in expected.keys() - found.keys()]
    faults += [f"{key} was evaluated, but not by the run left alone" for key in found.keys() - expected.keys()]
    return Check(name, tuple(faults))


def audit(attacked: RunFolder, variables: Mapping[str, str]) -> Check:
    """By the real command, with these environment variables besides ours."""
    name = "each sample of each epoch was used exactly once (lockstep ckpt audit)"
    code, text = _ask(["ckpt", "audit", str(attacked.path)], variables)
    return Check(name) if code == 0 else Check(name, tuple(text.splitlines()) or (f"it ended with exit code {code}",))


def check_saved(reference: RunFolder, attacked: RunFolder, variables: Mapping[str, str]) -> Check:
    name = "the last checkpoint holds the state of the end (lockstep ckpt digest)"
    end = read_end(reference)
    expected = "" if end is None else str(end["digest"])
    _, text = _ask(["ckpt", "digest", str(attacked.path)], variables)
    return Check(name) if text.strip() == expected else Check(name, (f"expected {expected}, found {text}",))


def _ask(arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
    finished = subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments],
        env=environment.snapshot() | dict(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return finished.returncode, finished.stdout + finished.stderr


def num_traced(run: RunFolder) -> int:
    """Steps made, over all attempts."""
    return len(read_trace(run.trace))


def num_attempts(run: RunFolder) -> int:
    return sum(event.get("kind") == "start" for event in _lines(run.events))


def read_end(run: RunFolder) -> dict[str, Any] | None:
    ends = [event for event in _lines(run.events) if event.get("kind") == "end"]
    return ends[-1] if ends and "digest" in ends[-1] else None


def read_trace(path: Path) -> list[tuple[int, Step]]:
    """Step by step, as they were made."""
    return [(line["step"], line["phases"]) for line in _lines(path) if "step" in line and "phases" in line]


def read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _lines(path: Path) -> Sequence[dict[str, Any]]:
    return list(read_lines(path)) if path.exists() else []


def _shown(end: Mapping[str, Any] | None) -> str:
    return "nothing" if end is None else json.dumps({name: end[name] for name in ("step", "digest")})
