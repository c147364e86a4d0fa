"""Does a config keep the promise? The same bits on one process, on several, and through an interruption.

Four runs, each by the real `lockstep train`, traced, in a folder of its own; each is compared with the first. Nothing
is known of them but what their folders say.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.errors import EXIT_FAILED, EXIT_STOPPED, UserError
from lockstep.events.jsonl import read_lines
from lockstep.events.run_folder import RunFolder
from lockstep.events.trace import Difference, first_difference

_STOP_GRACE_S = 10.0
_MAX_LOG_CHARS = 20_000  # of a run that failed

_AFTER_THE_LAST = "end"  # a phase that no trace has

_CAUSES = {
    "data": "The samples themselves differ. A data set and its augmentation must be a function of (seed, epoch, "
    "sample): draw from torch, numpy or random, which are seeded for every sample, and from nothing else (no "
    "SystemRandom, no os.urandom, no clock, no generator or counter of its own).",
    "loss": "The same samples gave another loss. The weights may have begun differently, or the forward pass depends "
    "on the rank or the process, keeps something in Python from one call to the next, draws from a random stream that "
    "lockstep does not seed, or uses another number of threads.",
    "gradient": "The same loss gave another gradient. A backward pass of your own may not be deterministic; if there "
    "is none, the sum over the ranks went wrong, which is lockstep's fault.",
    "state": "The same gradient left another state. The optimizer, the moving average or a buffer depends on the rank "
    "or the process, or draws from a random stream that lockstep does not seed.",
    _AFTER_THE_LAST: "All steps that both made were the same. Something was done outside of a step.",
}
_RESUME_CAUSE = (
    "Until it was stopped it was the same. Something that the next step needs is not in the checkpoint: a counter, a "
    "schedule or a cache in a Python object. Make it a buffer of the model, or hand it to run.keep(name, thing)."
)


class Leg(NamedTuple):
    """A stretch of a run: one command."""

    processes: int
    stop_after: int | None = None  # steps; else to the end


class Trial(NamedTuple):
    name: str  # and its folder's
    title: str
    legs: tuple[Leg, ...]

    @property
    def resumed_after(self) -> int | None:
        return self.legs[0].stop_after


class Failure(NamedTuple):
    exit_code: int
    text: str  # what the run had to say


class Finding(NamedTuple):
    """How a trial went."""

    trial: Trial
    digest: str | None = None  # at its end, if it came to it
    difference: Difference | None = None  # from the first trial
    failure: Failure | None = None

    @property
    def summary(self) -> str:
        if self.failure is not None:
            return f"failed with exit code {self.failure.exit_code}"
        return "the same" if self.difference is None else f"differs at {self.difference}"

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.trial.name,
            "runs": [{"processes": leg.processes, "stop_after": leg.stop_after} for leg in self.trial.legs],
            "digest": self.digest,
            "difference": None if self.difference is None else self.difference._asdict(),
            "exit_code": 0 if self.failure is None else self.failure.exit_code,
        }


@dataclass(frozen=True)
class Verdict:
    findings: tuple[Finding, ...]

    @property
    def parted(self) -> Finding | None:
        """The first that differs."""
        return next((finding for finding in self.findings if finding.difference is not None), None)

    @property
    def failure(self) -> Failure | None:
        """Of the run that failed, if one did: it was the last."""
        return self.findings[-1].failure

    @property
    def exit_code(self) -> int:
        if self.failure is not None:
            return self.failure.exit_code
        return 0 if self.parted is None else EXIT_FAILED

    @property
    def cause(self) -> str | None:
        """The likely one."""
        parted = self.parted
        if parted is None or parted.difference is None:
            return None
        step, phase, _, _ = parted.difference
        if parted.trial.resumed_after is not None and step > parted.trial.resumed_after:
            return _RESUME_CAUSE
        if self._one_process_repeats_itself:
            return _CAUSES[phase]
        return f"{_CAUSES[phase]} Two runs on one process differ as well."

    @property
    def _one_process_repeats_itself(self) -> bool:
        """As far as a trial that began on one process shows."""
        return not any(
            finding.difference is not None and finding.difference.step <= (finding.trial.resumed_after or 0)
            for finding in self.findings
            if finding.trial.legs[0].processes == 1
        )

    def lines(self) -> list[str]:
        """For a person; empty if a run failed before anything differed."""
        if self.parted is not None and self.parted.difference is not None:
            step, phase, tensor, num_tensors = self.parted.difference
            others = f" and {num_tensors - 1} more" if num_tensors > 1 else ""
            where = "after the last step" if phase == _AFTER_THE_LAST else f"in its {phase}"
            told = f"different: {self.parted.trial.title}: first at step {step}, {where}: {tensor}{others}"
            return [told, self.cause or ""]
        if self.failure is None:
            return [f"all {len(self.findings)} agree, bit for bit: digest {self.findings[0].digest}"]
        return []

    def as_json(self) -> dict[str, Any]:
        return {
            "equal": self.exit_code == 0,
            "trials": [finding.as_json() for finding in self.findings],
            "cause": self.cause,
        }


def trials(processes: int, steps: int) -> list[Trial]:
    """The first is what the others are compared with."""
    half, many = steps // 2, f"{processes} processes"
    stopped = f"stopped after step {half}, resumed on"
    return [
        Trial("one", "one process", (Leg(1),)),
        Trial("many", many, (Leg(processes),)),
        Trial("many-then-one", f"{many}, {stopped} one", (Leg(processes, half), Leg(1))),
        Trial("one-then-many", f"one process, {stopped} {processes}", (Leg(1, half), Leg(processes))),
    ]


def verify(
    config: str,
    overrides: Sequence[str],
    *,
    processes: int,
    steps: int,
    folder: Path,
    tell: Callable[[str], None],
) -> Verdict:
    """Make the trials in `folder`, telling how it goes; a run that fails is the last.

    `overrides`: with those of `trial_overrides`.
    """
    settings = [config, *overrides]
    findings: list[Finding] = []
    every = trials(processes, steps)
    width = max(len(trial.title) for trial in every)
    for trial in every:
        finding = _try(trial, settings, folder, reference=findings[0] if findings else None)
        findings.append(finding)
        outcome = finding.summary if len(findings) > 1 or finding.failure else f"digest {finding.digest}"
        tell(f"{trial.title:<{width}}  {outcome}")
        if finding.failure is not None:
            break
    return Verdict(tuple(findings))


def _try(trial: Trial, settings: Sequence[str], folder: Path, reference: Finding | None) -> Finding:
    failure = None
    for leg in trial.legs:
        failure = _train(leg, settings, folder / trial.name)
        if failure is not None:
            break
    run = RunFolder(folder / trial.name)
    digest = None if failure is not None else _end(run)["digest"]
    difference = None
    if reference is not None and run.trace.exists():  # also of one that failed: it may be why
        first = RunFolder(folder / reference.trial.name)
        difference = first_difference(first.trace, run.trace)
        if difference is None and failure is None:
            difference = _difference_at_the_end(_end(first), _end(run))
    return Finding(trial, digest, difference, failure)


def _train(leg: Leg, settings: Sequence[str], run: Path) -> Failure | None:
    command = [sys.executable, "-m", "lockstep", "train", *settings, "--run", str(run), "--quiet"]
    command += ["-n", str(leg.processes)] if leg.processes > 1 else []
    command += ["--stop-after", str(leg.stop_after)] if leg.stop_after is not None else []
    log = run.with_suffix(".log")  # beside the folder, which is the run's alone
    with log.open("wb") as output:
        code = _run(command, output)
    if leg.stop_after is not None and code == 0:
        raise UserError(f"the run ended before step {leg.stop_after}, where it was to be stopped: give fewer --steps")
    if code == (0 if leg.stop_after is None else EXIT_STOPPED):
        return None
    text = log.read_text(errors="replace").rstrip()
    return Failure(code if code > 0 else EXIT_FAILED, text[-_MAX_LOG_CHARS:])  # below 0: it was killed


def _run(command: Sequence[str], output: Any) -> int:
    """Run a command to its end. If we are stopped meanwhile, so is it, with all that it has started."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(_STOP_GRACE_S)
        finally:
            process.kill()
            process.wait()
        raise


def _end(run: RunFolder) -> dict[str, Any]:
    """What the run said of its end."""
    return [event for event in read_lines(run.events) if event.get("kind") == "end"][-1]


def _difference_at_the_end(left: dict[str, Any], right: dict[str, Any]) -> Difference | None:
    if (left["step"], left["digest"]) == (right["step"], right["digest"]):
        return None
    what = "the state" if left["step"] == right["step"] else f"{left['step']} steps and {right['step']}"
    return Difference(min(left["step"], right["step"]), _AFTER_THE_LAST, what, 1)
