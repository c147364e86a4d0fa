"""Compare a disturbed run with an undisturbed one, by their run folders: was anything lost?"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config import environment
from lockstep.events.jsonl import parse_json, read_jsonl
from lockstep.events.run_folder import RunFolder
from lockstep.events.step_trace import TRACE_PHASES

_MAX_SHOWN = 5  # problems of one check


class ChaosCheck(NamedTuple):
    """A check and the problems it found."""

    name: str
    problems: tuple[str, ...] = ()

    @property
    def is_passed(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self.is_passed:
            return f"ok    {self.name}"
        lines = [f"FAIL  {self.name}", *(f"      {problem}" for problem in self.problems[:_MAX_SHOWN])]
        if len(self.problems) > _MAX_SHOWN:
            lines.append(f"      and {len(self.problems) - _MAX_SHOWN} more")
        return "\n".join(lines)


class TracedStep(NamedTuple):
    """A step as it was made: for each phase, a digest of each tensor."""

    number: int
    phases: Mapping[str, Mapping[str, str]]


def check_run(reference: RunFolder, disturbed: RunFolder) -> list[ChaosCheck]:
    """Return all checks that only read the two run folders."""
    checks = [
        check_end(reference, disturbed),
        check_steps(reference, disturbed),
        check_resumes(disturbed),
        check_evaluations(reference, disturbed),
    ]
    if reference.evaluations.exists():
        checks.append(check_designs(reference, disturbed))
    return checks


def check_end(reference: RunFolder, disturbed: RunFolder) -> ChaosCheck:
    """Check that the last step and the final digest are equal."""
    name = "the run ended with the digest of the undisturbed run"
    expected, found = read_end(reference), read_end(disturbed)
    if found is None:
        return ChaosCheck(name, ("it did not record its end",))
    if expected is None or (expected["step"], expected["digest"]) != (found["step"], found["digest"]):
        return ChaosCheck(name, (f"expected {_end_in_words(expected)}, found {_end_in_words(found)}",))
    return ChaosCheck(name)


def check_steps(reference: RunFolder, disturbed: RunFolder) -> ChaosCheck:
    """Check that every step is equal, including those that a later attempt repeated."""
    expected = dict(read_run_trace(reference.trace))
    problems = []
    seen = set()
    for step, phases in read_run_trace(disturbed.trace):
        seen.add(step)
        if step not in expected:
            problems.append(f"step {step}: the undisturbed run has no such step")
            continue
        differing = next((phase for phase in TRACE_PHASES if phases.get(phase) != expected[step].get(phase)), None)
        if differing is not None:
            problems.append(f"step {step}: its {differing} differs from the undisturbed run")
    problems += [f"step {step} was never made" for step in sorted(expected.keys() - seen)]
    return ChaosCheck("every step of every attempt had the same samples, loss, gradient and state", tuple(problems))


def check_resumes(disturbed: RunFolder) -> ChaosCheck:
    """Check that a new attempt started wherever the steps go back, and resumed from exactly that step."""
    name = "every attempt resumed exactly where its checkpoint was, without a gap"
    starts = iter([event for event in _read_events(disturbed.events) if event.get("kind") == "start"])
    problems = []
    previous = None
    for step, _ in read_run_trace(disturbed.trace):
        if previous is None or step != previous + 1:
            # Attempts that made no step, or resumed with the very next one, leave no gap in the trace.
            if not any(event.get("step") == step - 1 for event in starts):
                problems.append(f"after step {previous or 0} came step {step}, but no attempt started there")
                break
            if previous is not None and step > previous + 1:
                problems.append(f"after step {previous} came step {step}: the steps between are missing")
        previous = step
    return ChaosCheck(name, tuple(problems))


def check_evaluations(reference: RunFolder, disturbed: RunFolder) -> ChaosCheck:
    """Check that the histories of evaluations are equal."""
    name = "the evaluations are the same, each once"
    if read_json(reference.history) == read_json(disturbed.history):
        return ChaosCheck(name)
    return ChaosCheck(name, (f"{disturbed.history} differs from {reference.history}",))


def check_designs(reference: RunFolder, disturbed: RunFolder) -> ChaosCheck:
    """Check that a search evaluated the same designs. An interrupted evaluation may be repeated, a finished one not."""
    name = "the same designs were evaluated, and no finished one again"
    expected, found = _count_designs(reference), _count_designs(disturbed)
    problems = [f"{key} was evaluated {count} times" for key, count in found.items() if count > 1]
    problems += [f"{key} was never evaluated" for key in expected.keys() - found.keys()]
    problems += [f"{key} was evaluated, but not by the undisturbed run" for key in found.keys() - expected.keys()]
    return ChaosCheck(name, tuple(problems))


def _count_designs(run: RunFolder) -> Counter[str | None]:
    files = sorted(run.evaluations.glob("*.jsonl"))
    return Counter(line.get("key") for path in files for line in _read_events(path))


def check_audit(disturbed: RunFolder, variables: Mapping[str, str]) -> ChaosCheck:
    """Run `lockstep ckpt audit` with these environment variables in addition to ours."""
    name = "each sample of each epoch was used exactly once (lockstep ckpt audit)"
    code, text = _run_lockstep(["ckpt", "audit", str(disturbed.path)], variables)
    if code == 0:
        return ChaosCheck(name)
    return ChaosCheck(name, tuple(text.splitlines()) or (f"it ended with exit code {code}",))


def check_saved(reference: RunFolder, disturbed: RunFolder, variables: Mapping[str, str]) -> ChaosCheck:
    """Run `lockstep ckpt digest` with these environment variables in addition to ours."""
    name = "the last checkpoint holds the final state (lockstep ckpt digest)"
    end = read_end(reference)
    expected = "" if end is None else str(end["digest"])
    _, text = _run_lockstep(["ckpt", "digest", str(disturbed.path)], variables)
    return ChaosCheck(name) if text.strip() == expected else ChaosCheck(name, (f"expected {expected}, found {text}",))


def _run_lockstep(arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
    finished = subprocess.run(
        [sys.executable, "-m", "lockstep", *arguments],
        env=environment.all_variables() | dict(variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return finished.returncode, finished.stdout + finished.stderr


def num_steps_made(run: RunFolder) -> int:
    """Return the number of steps over all attempts, including repeated ones."""
    return len(read_run_trace(run.trace))


def num_attempts(run: RunFolder) -> int:
    """Return how often the run was started or resumed."""
    return sum(event.get("kind") == "start" for event in _read_events(run.events))


def read_end(run: RunFolder) -> dict[str, Any] | None:
    """Return the run's end event, if it reached its end."""
    ends = [event for event in _read_events(run.events) if event.get("kind") == "end"]
    return ends[-1] if ends and "digest" in ends[-1] else None


def read_run_trace(path: Path) -> list[TracedStep]:
    """Return all steps in the order in which they were made."""
    lines = [line for line in _read_events(path) if "step" in line and "phases" in line]
    return [TracedStep(line["step"], line["phases"]) for line in lines]


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing or damaged."""
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def _read_events(path: Path) -> Sequence[dict[str, Any]]:
    return list(read_jsonl(path)) if path.exists() else []


def _end_in_words(end: Mapping[str, Any] | None) -> str:
    return "nothing" if end is None else json.dumps({name: end[name] for name in ("step", "digest")})
