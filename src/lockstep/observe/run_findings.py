"""Findings about a run, with remedies: stragglers, slow phases, losses that are not finite."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lockstep.config.plurals import count_noun
from lockstep.events.jsonl import parse_count
from lockstep.observe.run_record import RunRecord
from lockstep.observe.step_timing import RankTimes, Straggler, find_straggler
from lockstep.observe.text_format import format_percent, format_seconds

_MIN_TIMED_STEPS = 3  # with fewer, there are no findings about timing
_MIN_HELD_UP = 0.05  # share of a step: a straggler that costs less is not reported
_LARGE_SHARES = {"data": 0.2, "exchange": 0.25, "update": 0.35, "rest": 0.2}  # of a step
_LARGE_FAILED = 0.2  # share of all designs
_LARGE_SAVING, _LARGE_EVALUATING = 0.1, 0.3  # shares of the run time


class RunFinding(NamedTuple):
    """Something that stands out in a run."""

    about: str  # a phase, or "straggler", "saving", "evaluating", "loss", "failures"
    text: str


def run_findings(record: RunRecord) -> list[RunFinding]:
    """Return what stands out in a run, the most serious first; empty if nothing does."""
    found = _nonfinite_losses(record) + _failed_designs(record)
    ranks = record.ranks.times()
    if not ranks or min(each.num_timed for each in ranks) < _MIN_TIMED_STEPS:
        return found
    straggler = find_straggler(ranks)
    if straggler is not None and straggler.held_up_s >= _MIN_HELD_UP * median(each.step_s for each in ranks):
        found.append(RunFinding("straggler", describe_straggler(straggler, len(ranks))))
    else:
        straggler = None
    return found + _slow_phases(ranks, straggler, _num_machines(record)) + _saving_and_evaluating(ranks)


def verdict_lines(record: RunRecord) -> list[str]:
    """Return the findings as lines, or one line that says there are none."""
    if lines := [finding.text for finding in run_findings(record)]:
        return lines
    ranks = record.ranks.times()
    if record.is_search:
        return ["nothing stands out"] if record.designs.num else ["no design has been evaluated yet"]
    if not ranks:
        return ["no step has been timed yet: only every `log_every`-th step is"]
    if (num := min(each.num_timed for each in ranks)) < _MIN_TIMED_STEPS:
        return [f"only {count_noun(num, 'timed step')} so far: too few to judge by"]
    return ["nothing stands out"]


def describe_straggler(straggler: Straggler, num_ranks: int) -> str:
    """Say in a sentence which rank is slow, in what, and what that costs the others."""
    is_pair = num_ranks == 2
    other_ranks = "the other rank" if is_pair else "the other ranks"
    others_wait = "the other waits" if is_pair else "the others wait"
    work = "waiting for data" if straggler.phase == "data" else "its forward and backward pass"
    text = (
        f"rank {straggler.rank} is slow: {work} takes {format_seconds(straggler.seconds)} "
        f"({format_seconds(straggler.others_s)} on {other_ranks}), so {others_wait} "
        f"{format_seconds(straggler.held_up_s)} for it in every step"
    )
    if straggler.num_lanes > straggler.others_lanes:
        text += (
            f"; it has {count_noun(straggler.num_lanes, 'lane')}, {other_ranks} {'has' if is_pair else 'have'} "
            f"{straggler.others_lanes:g}: use a number of processes that divides the lanes, or set `lanes_per_rank`"
        )
    return text


def _nonfinite_losses(record: RunRecord) -> list[RunFinding]:
    return [
        RunFinding("loss", f"{name} was not finite at step {curve.nonfinite_steps[0]}")
        for name, curve in record.curves.items()
        if name.rpartition("/")[2] in ("loss", "train_loss") and curve.nonfinite_steps
    ]


def _failed_designs(record: RunRecord) -> list[RunFinding]:
    designs = record.designs
    if designs.num_failed < _LARGE_FAILED * designs.num or not designs.num_failed:
        return []
    reason, _ = designs.failure_reasons.most_common(1)[0]
    text = f"{designs.num_failed:,} of {count_noun(designs.num, 'design')} could not be evaluated; most often: {reason}"
    return [RunFinding("failures", text)]


def _num_machines(record: RunRecord) -> int:
    return parse_count(record.start.get("machines")) or 1


def _slow_phases(ranks: Sequence[RankTimes], straggler: Straggler | None, num_machines: int) -> list[RunFinding]:
    """Find phases that take long on every rank, judged by the rank that spends the least on them."""
    shares = {phase: min(each.phases[phase] / (each.step_s or 1.0) for each in ranks) for phase in _LARGE_SHARES}
    is_distributed = len(ranks) > 1
    spends = "every rank spends at least" if is_distributed else "the process spends"
    remedies = {
        "data": "waiting for data: raise `workers`, or do less work per sample",
        # Between processes of one machine, compressing takes longer than sending.
        "exchange": "waiting for gradients: use fewer processes or larger batches"
        + ", or compress gradients (`determinism: fast`, `compression: bf16`)" * (num_machines > 1),
        "update": "on the update" + ": `parallel: zero` shards it over the ranks" * is_distributed,
        "rest": "on other code in the loop body, such as logging",
    }
    found = []
    for phase, remedy in remedies.items():
        if phase == "exchange" and straggler is not None:
            continue  # the wait is for the straggler
        if shares[phase] >= _LARGE_SHARES[phase]:
            found.append(RunFinding(phase, f"{spends} {format_percent(shares[phase])} of each step {remedy}"))
    return found


def _saving_and_evaluating(ranks: Sequence[RankTimes]) -> list[RunFinding]:
    saving = max(each.saving for each in ranks)
    evaluating = max(each.evaluating for each in ranks)
    found = []
    if saving >= _LARGE_SAVING:
        text = f"saving takes {format_percent(saving)} of the run time: raise `checkpoint.every`"
        found.append(RunFinding("saving", text))
    if evaluating >= _LARGE_EVALUATING:
        text = f"evaluation takes {format_percent(evaluating)} of the run time: raise `evaluate_every`"
        found.append(RunFinding("evaluating", text))
    return found
