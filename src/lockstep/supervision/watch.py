"""When is a rank overdue? The watch compares each rank's pulse with what its run has needed so far. [Note: hangs]

With S, the hang limit: a phase may take S, or ten times the longest that any rank has needed for it; 10 S while no rank
has completed it yet, or before a script's first step. That is for a rank that rests. One that uses the processor, or
whose stack moves, may take ten times as long; one that waits for others is never overdue while another does something.
When all wait, nobody will ever come: they are judged after the limit.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lockstep.supervision.examination import Observation, RankNow, ReadPulse, examine, with_stacks_of_the_stopped
from lockstep.supervision.failure import Scene
from lockstep.supervision.hang import Hang, explain_hang
from lockstep.supervision.pulse import Phase, Reading
from lockstep.supervision.rank_files import RankFiles
from lockstep.supervision.standing import Judged, judge

_TIMES_LONGER = 10
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 4.0  # between two looks at ranks that are overdue
_PAUSE_SHARE = 0.05  # of how long it has taken
_AWAY_S = 5.0  # a watch that was not asked for so long was itself stopped, and its ranks perhaps with it


class Limits:
    """How long a phase may take, for a rank that rests."""

    def __init__(self, hang_limit_s: float) -> None:
        self.hang_limit_s = hang_limit_s
        self._longest_s: dict[Phase, float] = {}  # of any rank, in any attempt

    def learn(self, reading: Reading) -> None:
        for phase, longest_s in reading.longest_s.items():
            self._longest_s[phase] = max(longest_s, self._longest_s.get(phase, 0.0))

    def of(self, reading: Reading) -> float:
        is_new = reading.phase == Phase.SCRIPT and reading.step == 0  # each part of its beginning is another
        if is_new or reading.phase not in self._longest_s:
            return _TIMES_LONGER * self.hang_limit_s
        return max(self.hang_limit_s, _TIMES_LONGER * self._longest_s[reading.phase])


class Watch:
    """Of the ranks of one machine; for all attempts of a job."""

    def __init__(self, hang_limit_s: float, files: Callable[[int], RankFiles], read: ReadPulse) -> None:
        self._limits = Limits(hang_limit_s)
        self._files = files
        self._read = read
        self._before: dict[int, Observation] = {}  # the latest look at ranks that are overdue
        self._next_look = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._told: set[tuple[int, float]] = set()  # ranks and the beginnings of their phases: a hang is told once
        self.begin()

    def begin(self) -> None:
        """The ranks were started."""
        self._started = self._last = time.monotonic()
        self._told = set()
        self._put_off()

    def look(self, ranks: Sequence[RankNow], scene: Callable[[], Scene]) -> Hang | None:
        """A hang, if there is one, that was not told yet."""
        if time.monotonic() - self._last > _AWAY_S:
            self._started = time.monotonic()
        try:
            return self._look(ranks, scene)
        finally:
            self._last = time.monotonic()  # only now: a closer look takes its time

    def _look(self, ranks: Sequence[RankNow], scene: Callable[[], Scene]) -> Hang | None:
        now = time.monotonic()
        seen = [(rank, rank.reading or _not_begun(rank, self._started)) for rank in ranks]
        for _, reading in seen:
            self._limits.learn(reading)
        late = [rank for rank, reading in seen if rank.exit_code is None and self._is_late(reading, now)]
        if not late or all((rank.rank, reading.since) in self._told for rank, reading in seen if rank in late):
            self._put_off()
            return None
        if now < self._next_look:
            return None
        observed = examine(seen, self._files, self._read)
        before, self._before = self._before, {each.rank: each for each in observed}
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s(seen, now)) if before else _FIRST_PAUSE_S
        self._next_look = time.monotonic() + self._pause_s
        if not before:
            return None
        world_size = scene().world_size
        judged = [
            judge(before[each.rank], each, self._age_s(each.reading, each.at), world_size=world_size)
            for each in observed
        ]
        culprits = find_culprits(judged, self._limits, is_alone=world_size == len(ranks))
        if culprits is None:
            return None
        self._told = {(each.rank, each.reading.since) for each in observed}
        judged = [self._with_line(each) if each.now.rank in culprits else each for each in judged]
        hang = explain_hang(judged, culprits, scene())
        return replace(hang, facts={**hang.facts, "overdue_s": round(self._overdue_s(judged, culprits), 1)})

    def _overdue_s(self, judged: Sequence[Judged], culprits: set[int]) -> float:
        """Since when: the first culprit's time was up then; where all wait, all had waited too long."""
        if culprits:
            return max(each.age_s - _allowed_s(each, self._limits) for each in judged if each.now.rank in culprits)
        return min(each.age_s - self._limits.of(each.now.reading) for each in judged if each.meeting is not None)

    def _with_line(self, judged: Judged) -> Judged:
        """A stopped rank shows its stacks only if it may run for a moment."""
        if judged.now.state is None or not judged.now.state.is_stopped:
            return judged
        return judged._replace(now=with_stacks_of_the_stopped(judged.now, self._files(judged.now.rank)))

    def _longest_pause_s(self, seen: Sequence[tuple[RankNow, Reading]], now: float) -> float:
        """What takes far longer than any limit of a resting rank need not be looked at every few seconds."""
        age_s = max(self._age_s(reading, now) for _, reading in seen)
        is_long = age_s > 2 * _TIMES_LONGER * self._limits.hang_limit_s
        return max(_LONGEST_PAUSE_S, _PAUSE_SHARE * age_s) if is_long else _LONGEST_PAUSE_S

    def _put_off(self) -> None:
        self._before = {}
        self._next_look = 0.0

    def _age_s(self, reading: Reading, now: float) -> float:
        return now - max(reading.since, self._started)

    def _is_late(self, reading: Reading, now: float) -> bool:
        return self._age_s(reading, now) > self._limits.of(reading)


def find_culprits(judged: Sequence[Judged], limits: Limits, *, is_alone: bool) -> set[int] | None:
    """The ranks that are overdue and wait for no other; empty: all wait. None: this is no hang, or not yet.

    `is_alone`: no rank is on another machine.
    """
    running = [each for each in judged if not each.now.has_ended]
    waiting = [each for each in running if each.meeting is not None]
    elsewhere = [each for each in running if each.meeting is None]
    overdue = {each.now.rank for each in elsewhere if _is_overdue(each, limits, is_needed=bool(waiting))}
    if overdue:
        return overdue
    if elsewhere or not waiting:
        return None
    # Of several machines, the one on which somebody does not wait speaks first.
    patience = 1 if is_alone else 2
    is_over = all(each.age_s > patience * limits.of(each.now.reading) for each in waiting)
    return set() if is_over else None


def _is_overdue(judged: Judged, limits: Limits, *, is_needed: bool) -> bool:
    state, reading = judged.now.state, judged.now.reading
    if state is not None and state.is_traced:
        return False
    # Nothing is known about how long a script takes that does not train, or no more.
    is_training = reading.phase != Phase.SCRIPT or (reading.step > 0 and Phase.COMPUTING not in reading.longest_s)
    is_stopped = state is not None and state.is_stopped
    if not is_training and not is_needed and not is_stopped:
        return False
    return judged.age_s > _allowed_s(judged, limits)


def _allowed_s(judged: Judged, limits: Limits) -> float:
    state = judged.now.state
    if state is not None and state.is_stopped:
        return limits.hang_limit_s  # whatever it was doing: it does it no more
    return limits.of(judged.now.reading) * (_TIMES_LONGER if judged.is_busy else 1)


def _not_begun(rank: RankNow, started: float) -> Reading:
    return Reading(rank.pid, 0, 0, Phase.STARTING, started, None, False, False, {}, [])
