"""Decides when a rank is overdue: compares each rank's heartbeat with how long its phases have taken so far.

[Note: hangs]

Let S be the hang limit. A phase may take S, or ten times the longest that any rank has needed for it; 10 S if no rank
has completed it yet, or before a script's first step. These limits are for an idle rank: one that uses the CPU, or
whose stack changes, may take ten times as long. A rank that waits for other ranks is not overdue while any of them is
doing something. If all ranks wait for each other, they are overdue after the limit.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from lockstep.supervision.agent_folder import RankFiles
from lockstep.supervision.failure_report import FailureContext
from lockstep.supervision.hang_report import HangReport, explain_hang
from lockstep.supervision.heartbeat import Heartbeat, Phase
from lockstep.supervision.rank_probe import (
    RankObservation,
    RankStatus,
    ReadHeartbeat,
    probe_ranks,
    with_stacks_if_stopped,
)
from lockstep.supervision.wait_analysis import WaitAnalysis, analyze_wait

_TIMES_LONGER = 10
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 4.0  # between two probes of ranks that are overdue
_PAUSE_SHARE = 0.05  # of how long the phase has taken
_AWAY_S = 5.0  # a detector that was not polled for this long was itself stopped, perhaps with its ranks


class PhaseLimits:
    """How long each phase may take, for an idle rank: [Note: hangs]."""

    def __init__(self, hang_limit_s: float) -> None:
        self.hang_limit_s = hang_limit_s
        self._longest_s: dict[Phase, float] = {}  # of any rank, in any attempt

    def learn(self, heartbeat: Heartbeat) -> None:
        """Learn from a heartbeat how long a rank's phases have taken."""
        for phase, longest_s in heartbeat.longest_s.items():
            self._longest_s[phase] = max(longest_s, self._longest_s.get(phase, 0.0))

    def of(self, heartbeat: Heartbeat) -> float:
        """Return the limit for the phase that a rank is in, in seconds."""
        is_setup = heartbeat.phase == Phase.SCRIPT and heartbeat.step == 0  # each part of it runs for the first time
        if is_setup or heartbeat.phase not in self._longest_s:
            return _TIMES_LONGER * self.hang_limit_s
        return max(self.hang_limit_s, _TIMES_LONGER * self._longest_s[heartbeat.phase])


class HangDetector:
    """Watches the ranks of one machine for hangs, through all attempts of a job."""

    def __init__(self, hang_limit_s: float, files: Callable[[int], RankFiles], read: ReadHeartbeat) -> None:
        """`files` and `read` return a rank's files and heartbeat in the current attempt."""
        self._limits = PhaseLimits(hang_limit_s)
        self._files = files
        self._read = read
        self._before: dict[int, RankObservation] = {}  # the last probe, while ranks are overdue
        self._next_probe_at = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._reported: set[tuple[int, float]] = set()  # (rank, start of its phase): each hang is reported once
        self.begin()

    def begin(self) -> None:
        """Reset for a new attempt, whose ranks were just started."""
        self._started_at = self._polled_at = time.monotonic()
        self._reported = set()
        self._forget_probes()

    def poll(self, ranks: Sequence[RankStatus], context: Callable[[], FailureContext]) -> HangReport | None:
        """Return a hang that was not reported yet, if there is one."""
        if time.monotonic() - self._polled_at > _AWAY_S:
            self._started_at = time.monotonic()
        try:
            return self._poll(ranks, context)
        finally:
            self._polled_at = time.monotonic()  # only now: a probe takes time

    def _poll(self, ranks: Sequence[RankStatus], context: Callable[[], FailureContext]) -> HangReport | None:
        now = time.monotonic()
        seen = [(status, status.heartbeat or _not_begun(status, self._started_at)) for status in ranks]
        for _, heartbeat in seen:
            self._limits.learn(heartbeat)
        late = [(status, beat) for status, beat in seen if status.exit_code is None and self._is_late(beat, now)]
        if all((status.rank, beat.since) in self._reported for status, beat in late):
            self._forget_probes()
            return None
        if now < self._next_probe_at:
            return None
        analyzed = self._probe(seen, now, context)
        if analyzed is None:
            return None
        hung = find_hung_ranks(analyzed, self._limits, is_one_machine=context().world_size == len(ranks))
        if hung is None:
            return None
        self._reported = {(each.now.rank, each.now.heartbeat.since) for each in analyzed}
        analyzed = [self._with_stacks(each) if each.now.rank in hung else each for each in analyzed]
        report = explain_hang(analyzed, hung, context())
        return replace(report, facts={**report.facts, "overdue_s": round(self._overdue_s(analyzed, hung), 1)})

    def _probe(
        self, seen: Sequence[tuple[RankStatus, Heartbeat]], now: float, context: Callable[[], FailureContext]
    ) -> list[WaitAnalysis] | None:
        """Probe the ranks, and compare with the previous probe; None if this is the first."""
        observed = probe_ranks(seen, self._files, self._read)
        before, self._before = self._before, {each.rank: each for each in observed}
        self._pause_s = min(2 * self._pause_s, self._max_pause_s(seen, now)) if before else _FIRST_PAUSE_S
        self._next_probe_at = time.monotonic() + self._pause_s
        if not before:
            return None
        world_size = context().world_size
        return [
            analyze_wait(before[each.rank], each, self._age_s(each.heartbeat, each.at), world_size=world_size)
            for each in observed
        ]

    def _overdue_s(self, analyzed: Sequence[WaitAnalysis], hung: set[int]) -> float:
        """Return how long ago the first hung rank's time was up; if all wait for each other, the last one's."""
        if hung:
            return max(each.age_s - _allowed_s(each, self._limits) for each in analyzed if each.now.rank in hung)
        return min(each.age_s - self._limits.of(each.now.heartbeat) for each in analyzed if each.peer_wait is not None)

    def _with_stacks(self, analyzed: WaitAnalysis) -> WaitAnalysis:
        if analyzed.now.state is None or not analyzed.now.state.is_stopped:
            return analyzed
        return analyzed._replace(now=with_stacks_if_stopped(analyzed.now, self._files(analyzed.now.rank)))

    def _max_pause_s(self, seen: Sequence[tuple[RankStatus, Heartbeat]], now: float) -> float:
        """Return the longest pause between probes; it grows once a phase has taken very long."""
        age_s = max(self._age_s(heartbeat, now) for _, heartbeat in seen)
        is_long = age_s > 2 * _TIMES_LONGER * self._limits.hang_limit_s
        return max(_MAX_PAUSE_S, _PAUSE_SHARE * age_s) if is_long else _MAX_PAUSE_S

    def _forget_probes(self) -> None:
        self._before = {}
        self._next_probe_at = 0.0

    def _age_s(self, heartbeat: Heartbeat, now: float) -> float:
        return now - max(heartbeat.since, self._started_at)

    def _is_late(self, heartbeat: Heartbeat, now: float) -> bool:
        return self._age_s(heartbeat, now) > self._limits.of(heartbeat)


def find_hung_ranks(analyzed: Sequence[WaitAnalysis], limits: PhaseLimits, *, is_one_machine: bool) -> set[int] | None:
    """Return the ranks that are overdue and do not wait for other ranks.

    An empty set means that all ranks wait for each other; None means that there is no hang, or not yet.
    """
    running = [each for each in analyzed if not each.now.has_ended]
    waiting = [each for each in running if each.peer_wait is not None]
    others = [each for each in running if each.peer_wait is None]
    overdue = {each.now.rank for each in others if _is_overdue(each, limits, is_needed=bool(waiting))}
    if overdue:
        return overdue
    if others or not waiting:
        return None
    # With several machines, one with a rank that does not wait should report first.
    patience = 1 if is_one_machine else 2
    is_over = all(each.age_s > patience * limits.of(each.now.heartbeat) for each in waiting)
    return set() if is_over else None


def _is_overdue(analyzed: WaitAnalysis, limits: PhaseLimits, *, is_needed: bool) -> bool:
    """`is_needed`: another rank waits for this one."""
    state, heartbeat = analyzed.now.state, analyzed.now.heartbeat
    if state is not None and state.is_traced:
        return False
    # How long a script may take is unknown if it does not train, or no longer does.
    is_training = heartbeat.phase != Phase.SCRIPT or (heartbeat.step > 0 and Phase.COMPUTING not in heartbeat.longest_s)
    is_stopped = state is not None and state.is_stopped
    if not is_training and not is_needed and not is_stopped:
        return False
    return analyzed.age_s > _allowed_s(analyzed, limits)


def _allowed_s(analyzed: WaitAnalysis, limits: PhaseLimits) -> float:
    state = analyzed.now.state
    if state is not None and state.is_stopped:
        return limits.hang_limit_s  # whatever it was doing, it is not doing it now
    return limits.of(analyzed.now.heartbeat) * (_TIMES_LONGER if analyzed.is_busy else 1)


def _not_begun(status: RankStatus, started_at: float) -> Heartbeat:
    return Heartbeat(
        pid=status.pid,
        main_thread=0,
        step=0,
        phase=Phase.STARTING,
        since=started_at,
        sample=None,
        is_stopping=False,
        has_compiler=False,
        longest_s={},
        data_workers=[],
    )
