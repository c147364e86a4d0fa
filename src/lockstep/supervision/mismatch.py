"""All ranks wait, each for the others: which one has left the common order of collectives?"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lockstep.supervision.collectives import Collective
from lockstep.supervision.examination import Observation
from lockstep.supervision.pulse import Phase
from lockstep.supervision.standing import Meeting

_Kind = tuple[str, str]  # a collective's name and sizes


class Mismatch(NamedTuple):
    ranks: tuple[int, ...]  # that have left it; empty: that cannot be told
    words: str  # what they did; empty: that cannot be told


def find_mismatch(observed: Sequence[Observation], meetings: Mapping[int, Meeting]) -> Mismatch:
    """By the flight recorder where it tells, else by where the most ranks are, else by who is ahead."""
    recorded = _by_the_recorder(observed)
    if recorded is not None:
        return recorded
    odd = _minority({rank: meeting.words for rank, meeting in meetings.items()})
    if odd:
        return Mismatch(odd, "")
    if len(set(meetings.values())) == 1:
        return Mismatch((), "")
    ahead = max(observed, key=_progress)
    others = [each for each in observed if each is not ahead]
    if len(others) == 1 and _progress(ahead) > _progress(others[0]):
        return Mismatch((ahead.rank,), "")
    return Mismatch((), "")


def _by_the_recorder(observed: Sequence[Observation]) -> Mismatch | None:
    groups = {collective.group for each in observed for collective in each.collectives}
    for group in sorted(groups):
        made = {each.rank: _of_group(each.collectives, group) for each in observed}
        if any(made.values()) and (found := _first_difference(made)) is not None:
            return found
    return None


def _of_group(collectives: Sequence[Collective], group: str) -> dict[int, Collective]:
    return {collective.number: collective for collective in collectives if collective.group == group}


def _first_difference(made: Mapping[int, Mapping[int, Collective]]) -> Mismatch | None:
    """Among what all ranks' recorders still reach back to."""
    first = max((min(each) for each in made.values() if each), default=0)
    last = max((max(each) for each in made.values() if each), default=0)
    common: list[_Kind] = []
    for number in range(first, last + 1):
        kinds = {rank: _kind(each.get(number)) for rank, each in made.items()}
        if len(set(kinds.values())) == 1 and (kind := next(iter(kinds.values()))) is not None:
            common.append(kind)
            continue
        expected = _expected(common)
        odd = _minority(kinds) or tuple(
            rank for rank, kind in kinds.items() if expected is not None and kind != expected
        )
        if not 0 < len(odd) < len(kinds):
            return None
        return Mismatch(odd, _words(odd, kinds, expected))
    return None


def _kind(collective: Collective | None) -> _Kind | None:
    return None if collective is None else (collective.name, collective.sizes)


def _expected(common: Sequence[_Kind]) -> _Kind | None:
    """What came after the same collective before: training repeats itself."""
    for index in range(len(common) - 1, 0, -1):
        if common[index - 1] == common[-1]:
            return common[index]
    return None


def _words(odd: Sequence[int], kinds: Mapping[int, _Kind | None], expected: _Kind | None) -> str:
    theirs = next((kind for rank, kind in kinds.items() if rank not in odd), None)
    own = kinds[odd[0]]
    who = " and ".join(f"rank {rank}" for rank in odd)
    have = "has" if len(odd) == 1 else "have"
    if theirs is not None and (own is None or theirs == expected):
        return f"{who} {have} skipped the {theirs[0]} of {theirs[1]} that the other ranks make"
    if own is not None and theirs is not None:
        return f"{who} {have} called {own[0]} of {own[1]} where the other ranks call {theirs[0]} of {theirs[1]}"
    return f"{who} {have} called {own[0]} of {own[1]}, which the other ranks do not" if own is not None else ""


def _minority(kinds: Mapping[int, object]) -> tuple[int, ...]:
    """The ranks that do not what more than half of all do."""
    (common, count), *_ = Counter(kinds.values()).most_common() or [(None, 0)]
    if 2 * count <= len(kinds):
        return ()
    return tuple(sorted(rank for rank, kind in kinds.items() if kind != common))


def _progress(observed: Observation) -> tuple[int, int]:
    phase = observed.reading.phase
    return observed.reading.step, 0 if phase == Phase.SCRIPT else int(phase)
