"""Finds the rank whose order of collectives differs, when all ranks wait for each other, or one was aborted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from lockstep.supervision.flight_recorder import Collective
from lockstep.supervision.rank_probe import RankObservation
from lockstep.supervision.wait_analysis import PeerWait


class CollectiveMismatch(NamedTuple):
    """Which ranks called different collectives from the rest, and how."""

    ranks: tuple[int, ...]  # empty: unknown
    words: str  # what they did; empty: unknown


SAME_ORDER = (
    "Every rank must call the same collectives in the same order: look for a branch, the length of a loop or an early "
    "`continue` that depends on the rank or its data"
)
UNKNOWN_MISMATCH = CollectiveMismatch((), "")


def find_mismatch(observed: Sequence[RankObservation], waits: Mapping[int, PeerWait]) -> CollectiveMismatch:
    """Find the odd ranks out: by the flight recorder, else by where most ranks wait, else by which is a step ahead.

    Args:
        observed: all ranks of the job.
        waits: where each rank waits, by rank.
    """
    recorded = _from_flight_recorder(observed)
    if recorded is not None:
        return recorded
    odd = _minority({rank: wait.words for rank, wait in waits.items()})
    if odd:
        return CollectiveMismatch(odd, "")
    if len(set(waits.values())) == 1:
        return UNKNOWN_MISMATCH
    *others, ahead = sorted(observed, key=lambda each: each.heartbeat.step)
    if len(others) == 1 and ahead.heartbeat.step > others[0].heartbeat.step:
        return CollectiveMismatch((ahead.rank,), "")
    return UNKNOWN_MISMATCH  # within a step, either may be wrong


def find_deviation(recorded: Mapping[int, Sequence[Collective]]) -> CollectiveMismatch:
    """Find ranks that went wrong, when gloo has aborted a rank that received more data than it expected.

    Such a rank waits in a collective of gloo that occurs in every step, but is not the next one, and larger. Otherwise
    the larger number of ranks is right, if one can tell: the aborted rank was not in the largest collective.

    Args:
        recorded: the last collectives of the other ranks; the aborted rank's are lost.
    """
    awaited = {
        rank: last
        for rank, collectives in recorded.items()
        if (last := _last_awaited(collectives)) is not None and last.backend == "gloo"
    }
    deviations: dict[int, str] = {}
    for rank, last in awaited.items():
        group = sorted(_of_group(recorded[rank], last.group).items())
        common = [each for number, each in group if number < last.number]
        expected = _expected_next(common)
        if expected is not None and last.num_elements > expected.num_elements and _has_occurred(last, common):
            deviations[rank] = f"skipped the {expected.words} and called {last.words} instead"
    if deviations and 2 * len(deviations) <= max(2, len(recorded)):
        return CollectiveMismatch(tuple(deviations), next(iter(deviations.values())))
    return _fewest_in_the_largest(awaited)


def _fewest_in_the_largest(awaited: Mapping[int, Collective]) -> CollectiveMismatch:
    """Find the ranks in the largest collective, if more ranks are in another; else say who is in which."""
    if not awaited:
        return UNKNOWN_MISMATCH
    largest = max(awaited.values(), key=lambda each: each.num_elements)
    same_place = {
        rank: each for rank, each in awaited.items() if (each.group, each.number) == (largest.group, largest.number)
    }
    ranks = tuple(rank for rank, each in same_place.items() if each.signature == largest.signature)
    others = [each for rank, each in same_place.items() if rank not in ranks]
    if len({each.signature for each in others}) == 1 and len(ranks) <= len(others):
        return CollectiveMismatch(ranks, f"called {largest.words} where most ranks call {others[0].words}")
    return CollectiveMismatch((), ", ".join(f"rank {rank} called {each.words}" for rank, each in awaited.items()))


def _last_awaited(collectives: Sequence[Collective]) -> Collective | None:
    """Return the collective that a rank waits in, or waited in when it lost contact."""
    unfinished = [each for each in collectives if not each.is_done]
    return min(unfinished, key=lambda each: each.started) if unfinished else next(reversed(collectives), None)


def _from_flight_recorder(observed: Sequence[RankObservation]) -> CollectiveMismatch | None:
    groups = {collective.group for each in observed for collective in each.collectives}
    awaited = {each.rank: {made.group for made in each.collectives if not made.is_done} for each in observed}
    for group in sorted(groups):
        recorded = {each.rank: _of_group(each.collectives, group) for each in observed}
        found = _first_difference(recorded)
        # A rank that waits in a collective of another group has not come to this one's yet.
        if found is not None and all(not awaited[rank] or group in awaited[rank] for rank in found.ranks):
            return found
    return None


def _of_group(collectives: Sequence[Collective], group: str) -> dict[int, Collective]:
    return {collective.number: collective for collective in collectives if collective.group == group}


def _first_difference(recorded: Mapping[int, Mapping[int, Collective]]) -> CollectiveMismatch | None:
    """Compare the ranks' collectives by number, as far back as every recorder reaches."""
    first = max((min(each) for each in recorded.values() if each), default=0)
    last = max((max(each) for each in recorded.values() if each), default=0)
    common: list[Collective] = []
    for number in range(first, last + 1):
        found = {rank: each.get(number) for rank, each in recorded.items()}
        signatures = {rank: None if each is None else each.signature for rank, each in found.items()}
        if len(set(signatures.values())) == 1 and (collective := next(iter(found.values()))) is not None:
            common.append(collective)
            continue
        expected = _expected_next(common)
        odd = _minority(signatures)
        if not odd and expected is not None:
            odd = tuple(rank for rank, signature in signatures.items() if signature != expected.signature)
        if not 0 < len(odd) < len(found):
            return None
        return CollectiveMismatch(odd, _describe(odd, found, common))
    return None


def _expected_next(common: Sequence[Collective]) -> Collective | None:
    """Return what followed when the end of the common collectives occurred before: training steps repeat."""
    earlier = range(len(common) - 1, 0, -1)
    best = max(earlier, key=lambda index: _num_equal_before(common, index), default=0)  # of equals, the latest
    return common[best] if best and common[best - 1].signature == common[-1].signature else None


def _num_equal_before(common: Sequence[Collective], index: int) -> int:
    """Return how many collectives before `index` equal those at the end."""
    pairs = zip(reversed(common[:index]), reversed(common), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0].signature == pair[1].signature, pairs))


def _describe(odd: Sequence[int], found: Mapping[int, Collective | None], common: Sequence[Collective]) -> str:
    theirs = next((collective for rank, collective in found.items() if rank not in odd), None)
    own = found[odd[0]]
    who = " and ".join(f"rank {rank}" for rank in odd)
    if theirs is not None and (own is None or _has_occurred(own, common)):
        return f"{who} skipped the {theirs.words} that the other ranks call"
    if own is not None and theirs is not None:
        return f"{who} called {own.words} where the other ranks call {theirs.words}"
    return f"{who} called {own.words}, which the other ranks do not" if own is not None else ""


def _has_occurred(collective: Collective, common: Sequence[Collective]) -> bool:
    """Is it one that all ranks have called before? Then a rank has come to it by skipping others."""
    return any(each.signature == collective.signature for each in common)


def _minority(by_rank: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ranks that differ from what more than half of all ranks have in common."""
    (common, count), *_ = Counter(by_rank.values()).most_common() or [(None, 0)]
    if 2 * count <= len(by_rank):
        return ()
    return tuple(sorted(rank for rank, value in by_rank.items() if value != common))
