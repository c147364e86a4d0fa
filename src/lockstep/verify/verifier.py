"""Run the trials of `lockstep verify` one after another, and compare each with the first."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.plurals import count_noun
from lockstep.errors import UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.events.run_folder import RunFolder
from lockstep.events.step_trace import TraceDifference, first_difference, read_trace
from lockstep.verify.checklist import (
    ChecklistItem,
    check_metrics,
    check_who_printed,
    check_who_wrote,
)
from lockstep.verify.difference_causes import explain_difference, explain_rounding
from lockstep.verify.recorded_updates import UPDATE_PHASES, RecordedUpdates, collect_updates
from lockstep.verify.update_judgement import judge_updates
from lockstep.verify.value_comparison import UpdateValues, largest_gap
from lockstep.verify.verify_trials import (
    ConfigUnderTest,
    ScriptUnderTest,
    TrialFailure,
    TrialFiles,
    VerifySubject,
    VerifyTrial,
    first_trial,
    repeated_trial,
    resumed_trials,
    run_trial,
    second_trial,
)
from lockstep.verify.verify_verdict import END_OF_RUN, VerifyFinding, VerifyVerdict

ProgressReporter = Callable[[str], None]
InferenceCheck = Callable[[Path, Path], ChecklistItem]  # given the run folders of one process and of several

THE_STATE = "the state"
INFERENCE = "a checkpoint of several processes loads for inference in one"
_FAST_MODE_CAUSE = 'The run uses determinism="fast", which does not promise equal bits.'
_NUM_STEPS_CAUSE = "The steps that both runs made are the same, but when the loop ends depends on the processes."
_NOT_REPEATABLE_CAUSE = (
    "The same run, repeated, gave a different result: call torch.manual_seed(…) with a constant before any random draw."
)
_USAGE_ERROR = "exited with code 2"  # the code of argparse, click and others for an unknown option
# Options of `lockstep verify` that a script which fails may have received by mistake.
_OPTIONS = frozenset({"-n", "--nproc-per-node", "--steps", "--one-args", "--keep", "--json"})


def verify_config(
    settings: Sequence[str],
    *,
    processes: int,
    steps: int,
    folder: Path,
    report: ProgressReporter,
    inference: InferenceCheck,
) -> VerifyVerdict:
    """Verify a config with four trials; if a run fails, it is the last.

    Args:
        settings: the config and its overrides, including those of `trial_overrides`.
        processes: the number of processes to compare with one.
        steps: the number of steps of each trial.
        folder: where to put the trials' files.
        report: called with a line of progress.
        inference: the check that a checkpoint loads for inference.
    """
    every = [first_trial(), second_trial(processes), *resumed_trials(processes, steps)]
    comparison = _Comparison(ConfigUnderTest(settings), folder, report, width=max(len(trial.title) for trial in every))
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
    report: ProgressReporter,
) -> VerifyVerdict:
    """Verify a script: with four trials if its runs have a folder, else with two.

    If these differ by more than rounding, the first is repeated.

    Args:
        target: the script and its arguments, or -m and a module.
        processes: the number of processes to compare with one.
        steps: the number of steps after which each run is stopped.
        one_args: additional arguments, only for the run on one process.
        folder: where to put the trials' files.
        report: called with a line of progress.
    """
    subject = ScriptUnderTest(target, steps, one_args)
    comparison = _Comparison(subject, folder, report, width=len(repeated_trial().title))
    first = comparison.add(first_trial())
    if first.failure is not None:
        return comparison.verdict(processes, notes=_misplaced_options(target, first.failure))
    if comparison.add(second_trial(processes)).failure is not None:
        return comparison.verdict(processes)
    if not comparison.has_own_loop and comparison.can_resume and (first.steps or 0) >= 2:
        for trial in resumed_trials(processes, first.steps or 0):
            if comparison.add(trial).failure is not None:
                break
    elif comparison.findings[-1].difference is not None and not comparison.findings[-1].is_rounding:
        comparison.add(repeated_trial())
    return comparison.verdict(processes, asked=steps)


class _Comparison:
    """The trials so far, and the finding about each."""

    def __init__(self, subject: VerifySubject, folder: Path, report: ProgressReporter, width: int = 0) -> None:
        self.findings: list[VerifyFinding] = []
        self.updates: dict[str, RecordedUpdates] = {}  # of each trial, if the loop is not lockstep's
        self._subject = subject
        self._folder = folder.resolve()  # a script may change its working directory
        self._report = report
        self._width = width

    @property
    def has_own_loop(self) -> bool:
        """Does the script train with a loop that is not lockstep's?"""
        return bool(self.updates)

    @property
    def can_resume(self) -> bool:
        """Do the first trial's runs have a folder to resume from?"""
        return self._files(self.findings[0].trial).run.exists()

    def add(self, trial: VerifyTrial) -> VerifyFinding:
        """Run a trial, compare it with the first, and report the finding."""
        files = self._files(trial)
        failure = run_trial(self._subject, files)
        finding = VerifyFinding(trial, failure=failure)
        traces = self._subject.traces(files)
        updates = None if traces else collect_updates(files.records())
        if updates is not None:
            self.updates[trial.name] = updates
            traces = {"": updates.trace}
        traces = {name: trace for name, trace in traces.items() if read_trace(trace)}
        if failure is None:
            if not traces and updates is None:
                raise UserError(
                    f"{trial.title}: nothing was trained, so there is nothing to compare: the script must make steps "
                    "with a torch optimizer or lockstep.Run"
                )
            finding = finding._replace(digest=self._digest(files, traces))
        if traces:
            finding = finding._replace(steps=max(len(read_trace(trace)) for trace in traces.values()))
        if self.findings and updates is not None and "one" in self.updates:
            finding = self._judged(finding, updates)
        elif self.findings and traces:  # also after a failure: a difference may be its cause
            finding = self._compared(finding, traces)
        self.findings.append(finding)
        is_first = len(self.findings) == 1 and failure is None
        self._report(f"{trial.title:<{self._width}}  {finding.baseline if is_first else finding.summary}")
        return finding

    def verdict(
        self,
        processes: int,
        *,
        inference: InferenceCheck | None = None,
        asked: int | None = None,
        notes: Sequence[str] = (),
    ) -> VerifyVerdict:
        """Return all findings with the checklist; `asked` is the number of steps that the user asked for."""
        notes = list(notes)
        made = self.findings[0].steps
        if asked is not None and made is not None and made < asked:
            notes.append(f"the script trains for {count_noun(made, 'step')}, fewer than the {asked} asked for")
        repeated = next(filter(None, (updates.repeated_epoch for updates in self.updates.values())), None)
        if repeated is not None:
            notes.append(
                f"step {repeated[1]} begins an epoch with the same samples in the same order as step {repeated[0]}, "
                "although the DistributedSampler shuffles: call sampler.set_epoch(epoch) at the start of every epoch"
            )
        return VerifyVerdict(tuple(self.findings), tuple(self._checks(processes, inference)), tuple(notes))

    def _compared(self, finding: VerifyFinding, traces: dict[str, Path]) -> VerifyFinding:
        first = self._subject.traces(self._files(self.findings[0].trial))
        if not first and "one" in self.updates:
            first = {"": self.updates["one"].trace}
        if first.keys() != traces.keys() and finding.failure is None:
            ours, theirs = (", ".join(names) or "none" for names in (first, traces))
            raise UserError(
                f"the script's runs have different folders each time ({ours}; {theirs}), so none could resume after a "
                "stop: give them fixed names"
            )
        for name in sorted(first.keys() & traces.keys()):
            difference = first_difference(first[name], traces[name])
            if difference is None and finding.failure is None:
                difference = compare_ends(*_ends(first[name], traces[name]))
            if difference is not None:
                has_other_length = difference.phase == END_OF_RUN and difference.tensor != THE_STATE
                cause = _FAST_MODE_CAUSE if _is_fast(traces[name].parent) else None
                return finding._replace(
                    difference=difference, run=name, cause=_NUM_STEPS_CAUSE if has_other_length else cause
                )
        return finding

    def _judged(self, finding: VerifyFinding, many: RecordedUpdates) -> VerifyFinding:
        """Compare the updates of a script with its own loop, of which rounding is expected."""
        one = self.updates["one"]
        judgement = judge_updates(one, many, is_complete=finding.failure is None)
        mistake = judgement.mistake
        at = mistake or (first_difference(one.trace, many.trace, UPDATE_PHASES) if many.num_updates else None)
        if at is None:
            return finding
        if mistake is None:
            cause = explain_rounding(one, many, judgement)
        elif finding.trial == repeated_trial():
            cause = _NOT_REPEATABLE_CAUSE
        else:
            cause = explain_difference(mistake, one, many, finding.trial.segments[0].processes)
        return finding._replace(difference=at, is_rounding=mistake is None, size=_size(at, one, many), cause=cause)

    def _files(self, trial: VerifyTrial) -> TrialFiles:
        return TrialFiles(self._folder, trial)

    def _digest(self, files: TrialFiles, traces: dict[str, Path]) -> str:
        """Return the final digest of a config's run; for a script that was stopped, a hash over its last steps."""
        end = _end(files.run)
        if end is not None:
            return str(end["digest"])
        last = {name: list(read_trace(trace).items())[-1] for name, trace in traces.items()}
        return hashlib.sha256(json.dumps(last, sort_keys=True).encode()).hexdigest()

    def _checks(self, processes: int, inference: InferenceCheck | None) -> Iterator[ChecklistItem]:
        """Yield the checklist: what the trials showed, and what could not be checked."""
        by_name = {finding.trial.name: finding for finding in self.findings}
        yield _trains("one process trains", by_name.get("one"))
        yield _trains(f"{processes} processes train", by_name.get("many"), self.findings[0].steps)
        one, many = by_name.get("one"), by_name.get("many")
        if one is None or many is None or one.failure is not None or many.failure is not None:
            return
        files = self._files(many.trial)
        yield check_who_wrote(files.records(), self._folder, Path.cwd())
        yield check_who_printed(files.records())
        yield self._inference(inference)
        yield self._metrics()
        yield _bits(many, "rows, gradients and weights" if self.has_own_loop else "data, loss, gradients and state")
        resumed = [finding for name, finding in by_name.items() if "-then-" in name]
        short = self.can_resume and not self.has_own_loop
        yield _resumes(resumed, "there is only one step" if short else "the script has no run folder to resume from")

    def _inference(self, inference: InferenceCheck | None) -> ChecklistItem:
        if inference is None:
            return ChecklistItem(INFERENCE, None, "the script's model is its own")
        return inference(*(self._files(finding.trial).run for finding in self.findings[:2]))

    def _metrics(self) -> ChecklistItem:
        all_files = [self._files(finding.trial) for finding in self.findings[:2]]
        traces = [self._subject.traces(files) for files in all_files]
        losses: list[tuple[str, str]] = []
        common_runs = sorted(traces[0].keys() & traces[1].keys())
        for name in common_runs:
            steps = [read_trace(trace[name]) for trace in traces]
            common = sorted(steps[0].keys() & steps[1].keys())
            losses += [(_loss(steps[0][step]), _loss(steps[1][step])) for step in common if "loss" in steps[0][step]]
        one, many = ([RunFolder(trace[name].parent).events for name in common_runs] for trace in traces)
        return check_metrics(one, many, losses)


def compare_ends(left: dict[str, Any], right: dict[str, Any]) -> TraceDifference | None:
    """Return the difference between two runs' end events, if any."""
    if (left["step"], left["digest"]) == (right["step"], right["digest"]):
        return None
    what = THE_STATE if left["step"] == right["step"] else f"{left['step']} steps and {right['step']}"
    return TraceDifference(min(left["step"], right["step"]), END_OF_RUN, what, 1)


def _ends(*traces: Path) -> list[dict[str, Any]]:
    """Return the end events of these runs; if one was stopped before its end, the number of steps of each."""
    ends = [_end(trace.parent) for trace in traces]
    if any(end is None for end in ends):
        return [{"step": max(read_trace(trace)), "digest": ""} for trace in traces]
    return [end for end in ends if end is not None]


def _end(folder: Path) -> dict[str, Any] | None:
    """Return the run's end event, if it reached its end."""
    events = RunFolder(folder).events
    if not events.exists():
        return None
    return next((event for event in reversed(list(read_jsonl(events))) if event.get("kind") == "end"), None)


def _is_fast(folder: Path) -> bool:
    run = RunFolder(folder)
    return run.run_json.exists() and run.read_run_json().get("fingerprint", {}).get("determinism") == "fast"


def _loss(phases: dict[str, dict[str, Any]]) -> str:
    return str(phases["loss"].get("loss"))


def _size(at: TraceDifference, one: RecordedUpdates, many: RecordedUpdates) -> str | None:
    """Return the size of a difference between the jobs, in words; None if it is one between the ranks alone."""
    if at.phase == END_OF_RUN:
        return None
    pair = UpdateValues(one.rank_0.values(at.step), many.rank_0.values(at.step)).pairs(at.phase).get(at.tensor)
    if pair is None or pair[0].size == 0:
        return None
    gap = largest_gap(pair)
    is_between_ranks = many.disagreement is not None and at == many.disagreement.at
    return None if gap.largest == 0 and is_between_ranks else str(gap)


def _misplaced_options(target: Sequence[str], failure: TrialFailure) -> list[str]:
    """Return a note if a script seems to have failed because of options that were meant for `lockstep verify`."""
    if _USAGE_ERROR not in failure.text:
        return []
    script, *arguments = target[1:] if target[0] == "-m" else target
    misplaced = [argument for argument in arguments if argument.partition("=")[0] in _OPTIONS]
    options = ", ".join(misplaced)
    return [f"{options} went to the script: put options of lockstep verify before {script}"] if misplaced else []


def _trains(what: str, finding: VerifyFinding | None, expected: int | None = None) -> ChecklistItem:
    if finding is None:
        return ChecklistItem(what, None, "a run before it failed")
    if finding.failure is not None:
        return ChecklistItem(what, False, f"exit code {finding.failure.exit_code}")
    made = count_noun(finding.steps or 0, "step")
    if expected is not None and finding.steps != expected:
        return ChecklistItem(what, False, f"{made}, but {expected} on one process")
    return ChecklistItem(what, True, made)


def _bits(finding: VerifyFinding, compared: str) -> ChecklistItem:
    what = "every bit is the same on one process and on several"
    if finding.difference is None:
        return ChecklistItem(what, True, f"{compared} of {count_noun(finding.steps or 0, 'step')}")
    return ChecklistItem(what, False, f"first at {finding.difference}")


def _resumes(findings: Sequence[VerifyFinding], why_not: str) -> ChecklistItem:
    what = "a stop and a resume on another number of processes change nothing"
    if not findings:
        return ChecklistItem(what, None, why_not)
    bad = [finding for finding in findings if finding.difference is not None or finding.failure is not None]
    if bad:
        return ChecklistItem(what, False, "; ".join(f"{finding.trial.title}: {finding.summary}" for finding in bad))
    return ChecklistItem(what, True, "; ".join(finding.trial.title for finding in findings))
