"""The verdict of `lockstep verify`: which trials agree, where the first difference is, and its likely cause."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lockstep.config.plurals import count_noun
from lockstep.errors import EXIT_DIFFERENT
from lockstep.events.step_trace import TraceDifference
from lockstep.verify.checklist import ChecklistItem
from lockstep.verify.verify_trials import TrialFailure, VerifyTrial

END_OF_RUN = "end"  # a phase, in addition to those of a trace

_CAUSES = {
    "data": "The samples themselves differ. A data set and its augmentation must be a function of (seed, epoch, "
    "sample): draw only from torch, numpy or random, which are seeded for every sample (not from SystemRandom, "
    "os.urandom, the clock, or your own generator or counter).",
    "loss": "The same samples gave a different loss. The initial weights may differ, or the forward pass depends on "
    "the rank or the process, keeps state in Python from one call to the next, draws from a random stream that "
    "lockstep does not seed, or uses a different number of threads.",
    "gradient": "The same loss gave a different gradient. A custom backward pass may not be deterministic; if there is "
    "none, the sum over the ranks is wrong, which is a bug in lockstep.",
    "state": "The same gradient gave a different state. The optimizer, the EMA or a buffer depends on the "
    "rank or the process, or draws from a random stream that lockstep does not seed.",
    END_OF_RUN: "All steps that both runs made are the same. Something was changed outside of a step.",
}
_RESUME_CAUSE = (
    "The runs were the same until the stop. Something that the next step needs is not in the checkpoint: a counter, a "
    "schedule or a cache in a Python object. Make it a buffer of the model, or use run.register_state(name, thing)."
)
_NOT_REPEATABLE = "Two runs on one process differ as well."

# How to describe the place of the difference, unless it is "in its PHASE".
_PLACES = {END_OF_RUN: "after the last step", "start": "in the weights before it", "rows": "in its data"}


class VerifyFinding(NamedTuple):
    """What was found about a trial."""

    trial: VerifyTrial
    digest: str | None = None  # of its final state, if it got there
    difference: TraceDifference | None = None  # from the first trial; the first that is more than rounding, if any is
    failure: TrialFailure | None = None
    run: str = ""  # the run that differs, if a script makes several
    steps: int | None = None  # made by each of its runs
    size: str | None = None  # of the difference, in words, if values were recorded
    cause: str | None = None  # if more than the phase is known
    is_rounding: bool = False  # the difference, and all that follow

    @property
    def summary(self) -> str:
        """How it compares with the first trial."""
        if self.failure is not None:
            return f"failed with exit code {self.failure.exit_code}"
        if self.is_rounding:
            return f"the same except for rounding, first at {self.difference}"
        return "the same" if self.difference is None else f"differs at {self.difference}"

    @property
    def baseline(self) -> str:
        """The summary of the first trial, which the others are compared with."""
        made = [] if self.steps is None else [count_noun(self.steps, "step")]
        return ", ".join([*made, *([f"digest {self.digest}"] if self.digest is not None else [])])

    def as_json(self) -> dict[str, Any]:
        values = {
            "name": self.trial.name,
            "runs": [
                {"processes": segment.processes, "stop_after": segment.stop_after} for segment in self.trial.segments
            ],
            "digest": self.digest,
            "difference": None if self.difference is None else self.difference._asdict(),
            "is_rounding": self.is_rounding,
            "exit_code": 0 if self.failure is None else self.failure.exit_code,
        }
        optional = {"run": self.run or None, "steps": self.steps, "size": self.size}
        return values | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True)
class VerifyVerdict:
    """All findings, the checklist, and notes for the user."""

    findings: tuple[VerifyFinding, ...]
    checks: tuple[ChecklistItem, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def result(self) -> Literal["same", "rounding", "different", "failed"]:
        """What was found, in a word."""
        if self.failure is not None:
            return "failed"
        if self.differing is None:
            return "same"
        return "rounding" if self.differing.is_rounding else "different"

    @property
    def differing(self) -> VerifyFinding | None:
        """The first trial that differs from the first one by more than rounding, or else by rounding."""
        differing = [finding for finding in self.findings if finding.difference is not None]
        return next(iter(sorted(differing, key=lambda finding: finding.is_rounding)), None)

    @property
    def failure(self) -> TrialFailure | None:
        """The failure that ended the verification, if there was one."""
        return self.findings[-1].failure

    @property
    def exit_code(self) -> int:
        if self.failure is not None:
            return self.failure.exit_code
        is_broken = any(check.is_promise and check.holds is False for check in self.checks)
        return EXIT_DIFFERENT if self.result == "different" or is_broken else 0

    @property
    def cause(self) -> str | None:
        """The likely cause of the first difference."""
        differing = self.differing
        if differing is None or differing.difference is None:
            return None
        step, phase, _, _ = differing.difference
        if differing.trial.resumed_after is not None and step > differing.trial.resumed_after:
            return _RESUME_CAUSE
        cause = differing.cause or _CAUSES[phase]
        return cause if self._one_process_repeats_itself else f"{cause} {_NOT_REPEATABLE}"

    @property
    def _one_process_repeats_itself(self) -> bool:
        """Do all runs that started on one process agree, as far as the trials show?"""
        return not any(
            finding.difference is not None
            and (finding.trial.resumed_after is None or finding.difference.step <= finding.trial.resumed_after)
            for finding in self.findings
            if finding.trial.segments[0].processes == 1
        )

    def lines(self) -> list[str]:
        """Return the verdict for a person to read."""
        return [*self._result_lines(), *self.notes, *(str(check) for check in self.checks)]

    def _result_lines(self) -> list[str]:
        failed = [] if self.failure is None else [self._failure_line(self.findings[-1])]
        if self.differing is not None and self.differing.difference is not None:
            if self.differing.is_rounding and failed:
                return failed
            step, phase, tensor, num_tensors = self.differing.difference
            run = f"{self.differing.run}, " if self.differing.run else ""
            others = f" and {num_tensors - 1} more" if num_tensors > 1 else ""
            size = f", {self.differing.size}" if self.differing.size else ""
            where = _PLACES.get(phase, f"in its {phase}")
            kind = "rounding" if self.differing.is_rounding else "different"
            line = f"{kind}: {self.differing.trial.title}: {run}first at step {step}, {where}: {tensor}{others}{size}"
            return [*failed, line, self.cause or ""]
        if failed:
            return failed
        digest = self.findings[0].digest
        return [f"all {len(self.findings)} agree, bit for bit" + (f": digest {digest}" if digest else "")]

    @staticmethod
    def _failure_line(finding: VerifyFinding) -> str:
        assert finding.failure is not None
        when = f"after step {finding.steps}" if finding.steps else "before the end of its first step"
        until = "; until then it differs by rounding alone" if finding.is_rounding else ""
        return (
            f"failed: {finding.trial.title} ended with exit code {finding.failure.exit_code} {when}, so there is no "
            f"result to compare{until}; the run's own output is on standard error"
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "result": self.result,
            "equal": self.failure is None and self.differing is None,
            "trials": [finding.as_json() for finding in self.findings],
            "cause": self.cause,
            "notes": list(self.notes),
            "checklist": [check.as_json() for check in self.checks],
        }
