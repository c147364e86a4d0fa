"""What stands out in where a run's time goes, in plain words, with what helps against it."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from lockstep.observe.record import Record
from lockstep.observe.timing import PHASES, RankTimes, Straggler, find_straggler
from lockstep.observe.wording import seconds, share, times

_FEWEST_TIMED = 3  # steps: of fewer, nothing is said
_HOLDS_UP = 0.05  # of a step: what costs less is not worth a word
_MUCH = {"data": 0.2, "exchange": 0.25, "update": 0.35, "rest": 0.2}  # shares of a step
_MUCH_FAILS = 0.2  # of all designs
_MUCH_SAVING, _MUCH_EVALUATING = 0.1, 0.3  # shares of all time


class Finding(NamedTuple):
    about: str  # a phase, or "straggler", "saving", "evaluating", "loss", "failures"
    text: str


def findings(record: Record) -> list[Finding]:
    """The gravest first; none, where nothing stands out."""
    found = _about_numbers(record) + _about_designs(record)
    ranks = record.ranks.times()
    if not ranks or min(each.num_timed for each in ranks) < _FEWEST_TIMED:
        return found
    straggler = find_straggler(ranks)
    if straggler is not None and straggler.held_up_s >= _HOLDS_UP * median(each.step_s for each in ranks):
        found.append(Finding("straggler", straggler_in_words(straggler, len(ranks))))
    else:
        straggler = None
    return found + _about_phases(ranks, straggler) + _about_asides(ranks)


def verdict(record: Record) -> list[str]:
    """The same as lines, also where there is nothing to say."""
    if lines := [finding.text for finding in findings(record)]:
        return lines
    ranks = record.ranks.times()
    if record.is_search:
        return ["nothing stands out"] if record.designs.num else ["no design was evaluated yet"]
    if not ranks:
        return ["no step was timed yet: it is every `log_every`-th one"]
    if (num := min(each.num_timed for each in ranks)) < _FEWEST_TIMED:
        return [f"{times(num, 'timed step')}: too few to judge by"]
    return ["nothing stands out"]


def straggler_in_words(straggler: Straggler, num_ranks: int) -> str:
    alone = num_ranks == 2
    what = "waiting for data" if straggler.phase == "data" else f"its {PHASES[straggler.phase]}"
    text = (
        f"rank {straggler.rank} is slow: {what} takes {seconds(straggler.seconds)} there and "
        f"{seconds(straggler.others_s)} on the other{'' if alone else 's'}, which "
        f"wait{'s' if alone else ''} {seconds(straggler.held_up_s)} of every step for it"
    )
    if straggler.num_lanes > straggler.others_lanes:
        text += (
            f"; it has {times(straggler.num_lanes, 'lane')} where the other{'' if alone else 's'} "
            f"ha{'s' if alone else 've'} {straggler.others_lanes:g}: a number of processes that divides the lanes, "
            "or `lanes_per_rank`, evens it out"
        )
    return text


def _about_numbers(record: Record) -> list[Finding]:
    return [
        Finding("loss", f"{name} was not a finite number at step {curve.nonfinite[0]}")
        for name, curve in record.curves.items()
        if name.rpartition("/")[2] in ("loss", "train_loss") and curve.nonfinite
    ]


def _about_designs(record: Record) -> list[Finding]:
    designs = record.designs
    if designs.num_failed < _MUCH_FAILS * designs.num or not designs.num_failed:
        return []
    reason, _ = designs.reasons.most_common(1)[0]
    text = f"{designs.num_failed:,} of {times(designs.num, 'design')} could not be evaluated; most often: {reason}"
    return [Finding("failures", text)]


def _about_phases(ranks: Sequence[RankTimes], straggler: Straggler | None) -> list[Finding]:
    """Of what all ranks do: the rank that has least of it counts."""
    shares = {phase: min(each.phases[phase] / (each.step_s or 1.0) for each in ranks) for phase in _MUCH}
    who = "all ranks spend at least" if len(ranks) > 1 else "it spends"
    found = []
    if shares["data"] >= _MUCH["data"]:
        found.append(
            Finding("data", f"{who} {share(shares['data'])} of each step waiting for data: raise `workers`, or do less")
        )
    if straggler is None and shares["exchange"] >= _MUCH["exchange"]:
        found.append(
            Finding(
                "exchange",
                f"{who} {share(shares['exchange'])} of each step waiting for gradients: fewer processes, larger "
                "batches or compression help",
            )
        )
    if shares["update"] >= _MUCH["update"]:
        helps = ": `parallel: zero` shares it out over the ranks" if len(ranks) > 1 else ""
        found.append(Finding("update", f"{who} {share(shares['update'])} of each step on the update{helps}"))
    if shares["rest"] >= _MUCH["rest"]:
        found.append(
            Finding(
                "rest", f"{who} {share(shares['rest'])} of each step on the rest of the loop's body, such as logging"
            )
        )
    return found


def _about_asides(ranks: Sequence[RankTimes]) -> list[Finding]:
    saving, evaluating = (max(getattr(each, name) for each in ranks) for name in ("saving", "evaluating"))
    found = []
    if saving >= _MUCH_SAVING:
        found.append(Finding("saving", f"saving takes {share(saving)} of all time: raise `checkpoint.every`"))
    if evaluating >= _MUCH_EVALUATING:
        found.append(Finding("evaluating", f"evaluating takes {share(evaluating)} of all time: raise `evaluate_every`"))
    return found
