"""Making the trials of a verification, one after another, and comparing each with the first."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import UserError
from lockstep.events.jsonl import read_lines
from lockstep.events.run_folder import RunFolder
from lockstep.events.trace import Difference, first_difference, read_trace
from lockstep.observe.verification.checklist import (
    Check,
    counted,
    metrics_agree,
    only_rank_0_printed,
    only_rank_0_wrote,
)
from lockstep.observe.verification.diagnosis import explain
from lockstep.observe.verification.gap import gap_in
from lockstep.observe.verification.trials import (
    ConfigSubject,
    ScriptSubject,
    Subject,
    Trial,
    TrialPlace,
    first_trial,
    make,
    repeated_trial,
    resumed_trials,
    second_trial,
)
from lockstep.observe.verification.updates import UPDATE_PHASES, Updates, collect
from lockstep.observe.verification.verdict import AFTER_THE_LAST, Finding, Verdict

Tell = Callable[[str], None]
Inference = Callable[[Path, Path], Check]  # of the runs of one process and of many


def verify_config(
    settings: Sequence[str], *, processes: int, steps: int, folder: Path, tell: Tell, inference: Inference
) -> Verdict:
    """Make the four trials of a config in `folder`, telling how it goes; a run that fails is the last.

    `settings`: the config, and what is laid over it, with what `trial_overrides` says.
    """
    every = [first_trial(), second_trial(processes), *resumed_trials(processes, steps)]
    comparison = _Comparison(ConfigSubject(settings), folder, tell, width=max(len(trial.title) for trial in every))
    for trial in every:
        if comparison.add(trial).failure is not None:
            break
    return comparison.verdict(processes, inference=inference)


def verify_script(
    target: Sequence[str],
    *,
    processes: int,
    steps: int,
    one_args: Sequence[str],
    folder: Path,
    tell: Tell,
) -> Verdict:
    """The same for a script: four trials if its runs have a folder; else two, and the first again if they part."""
    subject = ScriptSubject(target, steps, one_args)
    comparison = _Comparison(subject, folder, tell, width=len(repeated_trial().title))
    first = comparison.add(first_trial())
    if first.failure is not None or comparison.add(second_trial(processes)).failure is not None:
        return comparison.verdict(processes)
    if not comparison.is_foreign and comparison.has_folder and (first.steps or 0) >= 2:
        for trial in resumed_trials(processes, first.steps or 0):
            if comparison.add(trial).failure is not None:
                break
    elif comparison.findings[-1].difference is not None:
        comparison.add(repeated_trial())
    return comparison.verdict(processes, asked=steps)


class _Comparison:
    def __init__(self, subject: Subject, folder: Path, tell: Tell, width: int = 0) -> None:
        self.findings: list[Finding] = []
        self.updates: dict[str, Updates] = {}  # of each trial, where the loop is not lockstep's
        self._subject = subject
        self._folder = folder.resolve()  # a script may go elsewhere
        self._tell = tell
        self._width = width

    @property
    def is_foreign(self) -> bool:
        return bool(self.updates)

    @property
    def has_folder(self) -> bool:
        """Can the first trial's runs go on after a stop?"""
        return self._place(self.findings[0].trial).run.exists()

    def add(self, trial: Trial) -> Finding:
        """Make it, compare it with the first, and tell."""
        place = self._place(trial)
        failure = make(self._subject, place)
        finding = Finding(trial, failure=failure)
        traces = self._subject.traces(place)
        if not traces and (updates := collect(place.witnesses())) is not None:
            self.updates[trial.name] = updates
            traces = {"": updates.trace}
        if failure is None:
            if not traces:
                raise UserError(
                    f"{trial.title}: nothing was trained, so there is nothing to compare: no optimizer made a step, "
                    "and no lockstep.Run did"
                )
            steps = max(len(read_trace(trace)) for trace in traces.values())
            finding = finding._replace(digest=self._digest(place, traces), steps=steps)
        if failure is not None:
            traces = {name: trace for name, trace in traces.items() if read_trace(trace)}
        if self.findings and traces:  # also of one that failed: it may be why
            finding = self._compared(finding, traces)
        self.findings.append(finding)
        is_first = len(self.findings) == 1 and failure is None
        self._tell(f"{trial.title:<{self._width}}  {finding.beginning if is_first else finding.summary}")
        return finding

    def verdict(self, processes: int, *, inference: Inference | None = None, asked: int | None = None) -> Verdict:
        notes = []
        made = self.findings[0].steps
        if asked is not None and made is not None and made < asked:
            notes.append(f"the script trains for {counted(made, 'step')}, fewer than the {asked} that were asked for")
        return Verdict(tuple(self.findings), tuple(self._checks(processes, inference)), tuple(notes))

    def _compared(self, finding: Finding, traces: dict[str, Path]) -> Finding:
        first = self._subject.traces(self._place(self.findings[0].trial))
        if not first and "one" in self.updates:
            first = {"": self.updates["one"].trace}
        if first.keys() != traces.keys() and finding.failure is None:
            ours, theirs = (", ".join(names) or "none" for names in (first, traces))
            raise UserError(
                f"the script's runs have other folders each time ({ours}; {theirs}), so that none could go on after a "
                "stop: give them names that stay"
            )
        for name in sorted(first.keys() & traces.keys()):
            difference = first_difference(first[name], traces[name], UPDATE_PHASES if self.is_foreign else None)
            if difference is None and finding.failure is None:
                difference = difference_at_the_end(*_ends(first[name], traces[name]))
            if difference is None and self.is_foreign and (discord := self.updates[finding.trial.name].discord):
                difference = discord.at  # rank 0 is like the one process, and others are not
            if difference is not None:
                finding = finding._replace(difference=difference, run=name)
                if self.is_foreign:
                    return self._explained(finding)
                return finding._replace(cause=_FAST) if _is_fast(traces[name].parent) else finding
        return finding

    def _explained(self, finding: Finding) -> Finding:
        at = finding.difference
        one, many = self.updates["one"], self.updates[finding.trial.name]
        if at is None or at.phase == AFTER_THE_LAST:
            return finding
        places = one.rank_0.values(at.step), many.rank_0.values(at.step)
        gap = gap_in(at.phase, *places, tensor=at.tensor)
        cause = explain(at, one, many, finding.trial.legs[0].processes)
        return finding._replace(size=None if gap is None else str(gap), cause=cause)

    def _place(self, trial: Trial) -> TrialPlace:
        return TrialPlace(self._folder, trial)

    def _digest(self, place: TrialPlace, traces: dict[str, Path]) -> str:
        """A config's run says it; a script that was stopped does not, and has its last step's state."""
        end = _end(place.run)
        if end is not None:
            return str(end["digest"])
        last = {name: list(read_trace(trace).items())[-1] for name, trace in traces.items()}
        return hashlib.sha256(json.dumps(last, sort_keys=True).encode()).hexdigest()

    def _checks(self, processes: int, inference: Inference | None) -> Iterator[Check]:
        """What the trials have shown, and what they have not."""
        by_name = {finding.trial.name: finding for finding in self.findings}
        yield _trains("one process trains", by_name.get("one"))
        yield _trains(f"{processes} processes train", by_name.get("many"))
        one, many = by_name.get("one"), by_name.get("many")
        if one is None or many is None or one.failure is not None or many.failure is not None:
            return
        place = self._place(many.trial)
        yield only_rank_0_wrote(place.witnesses(), self._folder, Path.cwd())
        yield only_rank_0_printed(place.witnesses())
        yield self._inference(inference)
        yield self._metrics()
        yield _bits(many, "rows, gradients and weights" if self.is_foreign else "data, loss, gradients and state")
        resumed = [finding for name, finding in by_name.items() if "-then-" in name]
        short = self.has_folder and not self.is_foreign
        yield _resumes(resumed, "there is one step only" if short else "the script has no run folder to resume from")

    def _inference(self, inference: Inference | None) -> Check:
        if inference is None:
            return Check(INFERENCE, None, "the script's model is its own")
        return inference(*(self._place(finding.trial).run for finding in self.findings[:2]))

    def _metrics(self) -> Check:
        places = [self._place(finding.trial) for finding in self.findings[:2]]
        traces = [self._subject.traces(place) for place in places]
        losses: list[tuple[str, str]] = []
        common_runs = sorted(traces[0].keys() & traces[1].keys())
        for name in common_runs:
            steps = [read_trace(trace[name]) for trace in traces]
            common = sorted(steps[0].keys() & steps[1].keys())
            losses += [(_loss(steps[0][step]), _loss(steps[1][step])) for step in common if "loss" in steps[0][step]]
        one, many = ([RunFolder(trace[name].parent).events for name in common_runs] for trace in traces)
        return metrics_agree(one, many, losses)


_FAST = 'The run is made with determinism="fast", which promises no bits.'
INFERENCE = "a checkpoint of several processes loads for inference in one"


def difference_at_the_end(left: dict[str, Any], right: dict[str, Any]) -> Difference | None:
    """Between what two runs say of their ends."""
    if (left["step"], left["digest"]) == (right["step"], right["digest"]):
        return None
    what = "the state" if left["step"] == right["step"] else f"{left['step']} steps and {right['step']}"
    return Difference(min(left["step"], right["step"]), AFTER_THE_LAST, what, 1)


def _ends(*traces: Path) -> list[dict[str, Any]]:
    """What the runs of these traces said of their ends; of those that were stopped, after how many steps."""
    ends = [_end(trace.parent) for trace in traces]
    if any(end is None for end in ends):
        return [{"step": max(read_trace(trace)), "digest": ""} for trace in traces]
    return [end for end in ends if end is not None]


def _end(folder: Path) -> dict[str, Any] | None:
    """What the run said of its end, if it came to it."""
    events = RunFolder(folder).events
    if not events.exists():
        return None
    return next((event for event in reversed(list(read_lines(events))) if event.get("kind") == "end"), None)


def _is_fast(folder: Path) -> bool:
    facts = RunFolder(folder).facts
    return facts.exists() and RunFolder(folder).read_facts().get("fingerprint", {}).get("determinism") == "fast"


def _loss(phases: dict[str, dict[str, Any]]) -> str:
    return str(phases["loss"].get("loss"))


def _trains(what: str, finding: Finding | None) -> Check:
    if finding is None:
        return Check(what, None, "a run before it failed")
    if finding.failure is not None:
        return Check(what, False, f"exit code {finding.failure.exit_code}")
    return Check(what, True, counted(finding.steps or 0, "step"))


def _bits(finding: Finding, compared: str) -> Check:
    what = "every bit is the same on one process and on several"
    if finding.difference is None:
        return Check(what, True, f"{compared} of {counted(finding.steps or 0, 'step')}")
    return Check(what, False, f"first at {finding.difference}")


def _resumes(findings: Sequence[Finding], why_not: str) -> Check:
    what = "a stop and a resume on another number of processes change nothing"
    if not findings:
        return Check(what, None, why_not)
    bad = [finding for finding in findings if finding.difference is not None or finding.failure is not None]
    if bad:
        return Check(what, False, "; ".join(f"{finding.trial.title}: {finding.summary}" for finding in bad))
    return Check(what, True, "; ".join(finding.trial.title for finding in findings))
