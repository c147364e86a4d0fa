"""What came of the trials: which agree, where the first parts from the others, and why that may be."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from lockstep.errors import EXIT_FAILED
from lockstep.events.trace import Difference
from lockstep.observe.verification.checklist import Check, counted
from lockstep.observe.verification.trials import Failure, Trial

AFTER_THE_LAST = "end"  # a phase that no trace has

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
    AFTER_THE_LAST: "All steps that both made were the same. Something was done outside of a step.",
}
_RESUME_CAUSE = (
    "Until it was stopped it was the same. Something that the next step needs is not in the checkpoint: a counter, a "
    "schedule or a cache in a Python object. Make it a buffer of the model, or hand it to run.keep(name, thing)."
)
_NOT_ITSELF = "Two runs on one process differ as well."

# Where a phase does not say it by itself.
_PLACES = {AFTER_THE_LAST: "after the last step", "start": "in the weights before it", "rows": "in its data"}


class Finding(NamedTuple):
    """How a trial went."""

    trial: Trial
    digest: str | None = None  # at its end, if it came to it
    difference: Difference | None = None  # from the first trial
    failure: Failure | None = None
    run: str = ""  # the one that differs, where a script makes several
    steps: int | None = None  # made by each of its runs
    size: str | None = None  # of the difference, where values were kept
    cause: str | None = None  # if it is known better than by the phase alone

    @property
    def summary(self) -> str:
        if self.failure is not None:
            return f"failed with exit code {self.failure.exit_code}"
        return "the same" if self.difference is None else f"differs at {self.difference}"

    @property
    def beginning(self) -> str:
        """Of the first trial: what the others are compared with."""
        made = [] if self.steps is None else [counted(self.steps, "step")]
        return ", ".join([*made, *([f"digest {self.digest}"] if self.digest is not None else [])])

    def as_json(self) -> dict[str, Any]:
        told = {
            "name": self.trial.name,
            "runs": [{"processes": leg.processes, "stop_after": leg.stop_after} for leg in self.trial.legs],
            "digest": self.digest,
            "difference": None if self.difference is None else self.difference._asdict(),
            "exit_code": 0 if self.failure is None else self.failure.exit_code,
        }
        optional = {"run": self.run or None, "steps": self.steps, "size": self.size}
        return told | {name: value for name, value in optional.items() if value is not None}


@dataclass(frozen=True)
class Verdict:
    findings: tuple[Finding, ...]
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()

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
        is_bad = self.parted is not None or any(check.is_promise and check.holds is False for check in self.checks)
        return EXIT_FAILED if is_bad else 0

    @property
    def cause(self) -> str | None:
        """The likely one."""
        parted = self.parted
        if parted is None or parted.difference is None:
            return None
        step, phase, _, _ = parted.difference
        if parted.trial.resumed_after is not None and step > parted.trial.resumed_after:
            return _RESUME_CAUSE
        cause = parted.cause or _CAUSES[phase]
        return cause if self._one_process_repeats_itself else f"{cause} {_NOT_ITSELF}"

    @property
    def _one_process_repeats_itself(self) -> bool:
        """As far as a trial that began on one process shows."""
        return not any(
            finding.difference is not None
            and (finding.trial.resumed_after is None or finding.difference.step <= finding.trial.resumed_after)
            for finding in self.findings
            if finding.trial.legs[0].processes == 1
        )

    def lines(self) -> list[str]:
        """For a person; of the bits nothing is said if a run failed before anything differed."""
        return [*self._judgement(), *self.notes, *(str(check) for check in self.checks)]

    def _judgement(self) -> list[str]:
        if self.parted is not None and self.parted.difference is not None:
            step, phase, tensor, num_tensors = self.parted.difference
            run = f"{self.parted.run}, " if self.parted.run else ""
            others = f" and {num_tensors - 1} more" if num_tensors > 1 else ""
            size = f", {self.parted.size}" if self.parted.size else ""
            where = _PLACES.get(phase, f"in its {phase}")
            told = f"different: {self.parted.trial.title}: {run}first at step {step}, {where}: {tensor}{others}{size}"
            return [told, self.cause or ""]
        if self.failure is None:
            digest = self.findings[0].digest
            return [f"all {len(self.findings)} agree, bit for bit" + (f": digest {digest}" if digest else "")]
        return []

    def as_json(self) -> dict[str, Any]:
        return {
            "equal": self.failure is None and self.parted is None,
            "trials": [finding.as_json() for finding in self.findings],
            "cause": self.cause,
            "notes": list(self.notes),
            "checklist": [check.as_json() for check in self.checks],
        }
