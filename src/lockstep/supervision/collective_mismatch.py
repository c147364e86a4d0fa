"""Finds the rank whose order of collectives differs, when all ranks wait for each other, or one was aborted."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from lockstep.events.jsonl import parse_json
from lockstep.supervision.flight_recorder import Collective
from lockstep.supervision.heartbeat import Phase
from lockstep.supervision.rank_probe import RankObservation
from lockstep.supervision.wait_analysis import PeerWait


class CollectiveMismatch(NamedTuple):
    """Which ranks called different collectives from the rest, and how."""

    ranks: tuple[int, ...]  # empty: unknown
    words: str  # what they did; empty: unknown


class _Signature(NamedTuple):
    """What must be equal on all ranks of a collective."""

    name: str
    sizes: str


SAME_ORDER = (
    "Every rank must call the same collectives in the same order: look for a branch, the length of a loop or an early "
    "`continue` that depends on the rank or its data"
)
UNKNOWN_MISMATCH = CollectiveMismatch((), "")


def find_mismatch(observed: Sequence[RankObservation], waits: Mapping[int, PeerWait]) -> CollectiveMismatch:
    """Find the odd ranks out: by the flight recorder, else by where most ranks wait, else by which rank is ahead.

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
    ahead = max(observed, key=_progress)
    others = [each for each in observed if each is not ahead]
    if len(others) == 1 and _progress(ahead) > _progress(others[0]):
        return CollectiveMismatch((ahead.rank,), "")
    return UNKNOWN_MISMATCH


def find_deviation(recorded: Mapping[int, Sequence[Collective]]) -> CollectiveMismatch:
    """Find ranks that skipped a collective, when gloo has aborted a rank that received more data than it expected.

    Such a rank waits in a collective of gloo that is not the usual next one, and larger.

    Args:
        recorded: the last collectives of the other ranks; the aborted rank's are lost.
    """
    deviations: dict[int, str] = {}
    for rank, collectives in recorded.items():
        if (last := _last_awaited(collectives)) is None or last.backend != "gloo":
            continue
        group = sorted(_of_group(collectives, last.group).items())
        expected = _expected_next([_Signature(each.name, each.sizes) for number, each in group if number < last.number])
        if expected is not None and _num_elements(last.sizes) > _num_elements(expected.sizes):
            deviations[rank] = f"skipped the {expected.name} of {expected.sizes} and called {last.words} instead"
    if not deviations or 2 * len(deviations) > max(2, len(recorded)):
        return UNKNOWN_MISMATCH
    return CollectiveMismatch(tuple(deviations), next(iter(deviations.values())))


def _num_elements(sizes: str) -> int:
    """Return the number of elements of tensors, of which `sizes` are the shapes: `[[3, 4], [2]]`."""
    return sum(math.prod(shape) for shape in parse_json(sizes))


def _last_awaited(collectives: Sequence[Collective]) -> Collective | None:
    """Return the collective that a rank waits in, or waited in when it lost contact."""
    unfinished = [each for each in collectives if not each.is_done]
    return min(unfinished, key=lambda each: each.started) if unfinished else next(reversed(collectives), None)


def _from_flight_recorder(observed: Sequence[RankObservation]) -> CollectiveMismatch | None:
    groups = {collective.group for each in observed for collective in each.collectives}
    for group in sorted(groups):
        recorded = {each.rank: _of_group(each.collectives, group) for each in observed}
        if any(recorded.values()) and (found := _first_difference(recorded)) is not None:
            return found
    return None


def _of_group(collectives: Sequence[Collective], group: str) -> dict[int, Collective]:
    return {collective.number: collective for collective in collectives if collective.group == group}


def _first_difference(recorded: Mapping[int, Mapping[int, Collective]]) -> CollectiveMismatch | None:
    """Compare the ranks' collectives by number, as far back as every recorder reaches."""
    first = max((min(each) for each in recorded.values() if each), default=0)
    last = max((max(each) for each in recorded.values() if each), default=0)
    common: list[_Signature] = []
    for number in range(first, last + 1):
        found = {rank: _signature(each.get(number)) for rank, each in recorded.items()}
        if len(set(found.values())) == 1 and (signature := next(iter(found.values()))) is not None:
            common.append(signature)
            continue
        expected = _expected_next(common)
        odd = _minority(found)
        if not odd and expected is not None:
            odd = tuple(rank for rank, signature in found.items() if signature != expected)
        if not 0 < len(odd) < len(found):
            return None
        return CollectiveMismatch(odd, _describe(odd, found, expected))
    return None


def _signature(collective: Collective | None) -> _Signature | None:
    return None if collective is None else _Signature(collective.name, collective.sizes)


def _expected_next(common: Sequence[_Signature]) -> _Signature | None:
    """Return what followed when the end of the common collectives occurred before: training steps repeat."""
    earlier = range(len(common) - 1, 0, -1)
    best = max(earlier, key=lambda index: _num_equal_before(common, index), default=0)  # of equals, the latest
    return common[best] if best and common[best - 1] == common[-1] else None


def _num_equal_before(common: Sequence[_Signature], index: int) -> int:
    """Return how many collectives before `index` equal those at the end."""
    pairs = zip(reversed(common[:index]), reversed(common), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _describe(odd: Sequence[int], found: Mapping[int, _Signature | None], expected: _Signature | None) -> str:
    theirs = next((signature for rank, signature in found.items() if rank not in odd), None)
    own = found[odd[0]]
    who = " and ".join(f"rank {rank}" for rank in odd)
    if theirs is not None and (own is None or theirs == expected):
        return f"{who} skipped the {theirs.name} of {theirs.sizes} that the other ranks call"
    if own is not None and theirs is not None:
        return f"{who} called {own.name} of {own.sizes} where the other ranks call {theirs.name} of {theirs.sizes}"
    return f"{who} called {own.name} of {own.sizes}, which the other ranks do not" if own is not None else ""


def _minority(by_rank: Mapping[int, object]) -> tuple[int, ...]:
    """Return the ranks that differ from what more than half of all ranks have in common."""
    (common, count), *_ = Counter(by_rank.values()).most_common() or [(None, 0)]
    if 2 * count <= len(by_rank):
        return ()
    return tuple(sorted(rank for rank, value in by_rank.items() if value != common))


def _progress(observed: RankObservation) -> tuple[int, int]:
    phase = observed.heartbeat.phase
    return observed.heartbeat.step, 0 if phase == Phase.SCRIPT else int(phase)
