"""Decides when a rank is overdue: compares each rank's signs of life with how long its phases have taken so far.

[Note: hangs]

Let S be the hang limit. Progress is a new phase, an optimizer step or a collective. After the last one, a rank may take
S, or ten times the longest that any rank has needed for its phase; 10 S if no rank has completed that phase yet, or
before a script's first step, unless the script has made three collectives. These limits are for an idle rank: one that
uses the CPU itself or through its child processes, or whose stack changes, may take ten times as long. A rank that
waits for other ranks is not overdue while any of them is doing something. If all ranks wait for each other, they are
overdue after the limit.

An overdue rank is reported, and again each time it has taken four times as long. It may be healthy, so the job ends
only after the stop limit. If a hang is certain, it ends after S: [Note: certain hangs].
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from lockstep.supervision.agent_folder import RankFiles
from lockstep.supervision.certain_hangs import find_certain_hang
from lockstep.supervision.cpu_activity import CpuActivity
from lockstep.supervision.failure_report import FailureContext
from lockstep.supervision.flight_recorder import Collective
from lockstep.supervision.hang_report import HangReport, Outlook, explain_hang
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
_UNDER_WAY = 3  # collectives, after which a script without an optimizer is no longer being set up
_REPORT_AGAIN = 4  # times as late as the last report
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 4.0  # between two probes of ranks that are overdue
_PAUSE_SHARE = 0.05  # of how long the phase has taken
_AWAY_S = 5.0  # a detector that was not polled for this long was itself stopped, perhaps with its ranks


class PhaseLimits:
    """How long each phase may take, for an idle rank: [Note: hangs]."""

    def __init__(self, hang_limit_s: float) -> None:
        self.hang_limit_s = hang_limit_s
        self._longest_s: dict[Phase, float] = {}  # of any rank, in any attempt
        self._longest_pause_s = 0.0  # between collectives, of those that were reported

    def learn(self, heartbeat: Heartbeat) -> None:
        """Learn from a heartbeat how long a rank's phases have taken."""
        for phase, longest_s in heartbeat.longest_s.items():
            self._longest_s[phase] = max(longest_s, self._longest_s.get(phase, 0.0))

    def learn_pause(self, pause_s: float) -> None:
        """Learn that a pause which was reported has ended by itself."""
        self._longest_pause_s = max(pause_s, self._longest_pause_s)

    def of(self, heartbeat: Heartbeat, num_collectives: int = 0) -> float:
        """Return the limit in seconds for the phase that a rank is in, after the collectives it has made so far."""
        if is_setup(heartbeat):  # each part of it runs for the first time
            longest_s = self._longest_pause_s if num_collectives >= _UNDER_WAY else None
        else:
            longest_s = self._longest_s.get(heartbeat.phase)
        if longest_s is None:
            return _TIMES_LONGER * self.hang_limit_s
        return max(self.hang_limit_s, _TIMES_LONGER * longest_s)


def is_setup(heartbeat: Heartbeat) -> bool:
    """Is it a script's own code, before any optimizer step? Scripts without an optimizer never leave it."""
    return heartbeat.phase == Phase.SCRIPT and heartbeat.step == 0


class _Reported(NamedTuple):
    """What was last said about a rank."""

    progress_at: float  # of the rank, by which its hang is known
    age_s: float
    must_end: bool


class HangDetector:
    """Watches the ranks of one machine for hangs, through all attempts of a job."""

    def __init__(
        self,
        hang_limit_s: float,
        files: Callable[[int], RankFiles],
        read: ReadHeartbeat,
        *,
        stop_limit_s: float | None = None,
    ) -> None:
        """Watch with these limits.

        Args:
            hang_limit_s: S of [Note: hangs].
            files: returns a rank's files in the current attempt.
            read: returns a rank's heartbeat in the current attempt.
            stop_limit_s: how long ranks that may be healthy can show no sign of life; None: for ever.
        """
        self._limits = PhaseLimits(hang_limit_s)
        self._stop_limit_s = stop_limit_s
        self._files = files
        self._read = read
        self._activity = CpuActivity()
        self._before: dict[int, RankObservation] = {}  # the last probe, while ranks are overdue
        self._pause_s = _FIRST_PAUSE_S
        self._next_probe_at = 0.0
        self.begin()

    def begin(self) -> None:
        """Reset for a new attempt, whose ranks were just started."""
        self._started_at = self._polled_at = time.monotonic()
        self._activity.forget()
        self._reported: dict[int, _Reported] = {}  # by rank
        self._last_collectives: dict[int, Collective] = {}  # of each rank, as far as we know
        self._collectives_at: dict[int, float] = {}  # when they began or ended
        self._num_collectives: dict[int, int] = {}  # of each rank, as far as we know
        self._forget_probes()

    def poll(self, ranks: Sequence[RankStatus], context: Callable[[], FailureContext]) -> HangReport | None:
        """Return a hang that was not reported yet, or is to be reported again, if there is one."""
        if time.monotonic() - self._polled_at > _AWAY_S:
            self._started_at = time.monotonic()
            self._reported = {}  # the time away is not a pause to learn from
        try:
            return self._poll(ranks, context)
        finally:
            self._polled_at = time.monotonic()  # only now: a probe takes time

    def _poll(self, ranks: Sequence[RankStatus], context: Callable[[], FailureContext]) -> HangReport | None:
        now = time.monotonic()
        seen = [(status, status.heartbeat or _not_begun(status, self._started_at)) for status in ranks]
        for status, heartbeat in seen:
            self._limits.learn(heartbeat)
            self._forget_report_if_over(status.rank, heartbeat)
        may_hang = [self._may_hang(status, heartbeat, now) for status, heartbeat in seen]  # a list: samples all ranks
        if not any(may_hang):
            self._forget_probes()
            return None
        if now < self._next_probe_at:
            return None
        analyzed = self._probe(seen, now, context)
        if analyzed is None:
            return None
        is_one_machine = context().world_size == len(ranks)
        hung = find_certain_hang(analyzed, self._limits.hang_limit_s, is_one_machine=is_one_machine)
        is_certain = hung is not None
        if hung is None:
            hung = find_hung_ranks(analyzed, self._limits, is_one_machine=is_one_machine)
        if hung is None:
            return None
        return self._report(analyzed, hung, is_certain, context())

    def _report(
        self, analyzed: Sequence[WaitAnalysis], hung: Collection[int], is_certain: bool, context: FailureContext
    ) -> HangReport | None:
        """Explain a hang, unless that was done and it is too early to do it again."""
        affected = [each for each in analyzed if each.now.rank in hung] or [
            each for each in analyzed if each.peer_wait is not None
        ]
        is_over = self._stop_limit_s is not None and has_passed_stop_limit(
            analyzed, hung, self._limits, self._stop_limit_s
        )
        must_end = is_certain or is_over
        if not any(self._is_news(each, must_end=must_end) for each in affected):
            return None
        for each in affected:
            progress_at = self._progress_at(each.now.rank, each.now.heartbeat)
            self._reported[each.now.rank] = _Reported(progress_at, each.age_s, must_end)
        analyzed = [self._with_stacks(each) if each.now.rank in hung else each for each in analyzed]
        stop_limit_s = self._stop_limit_s if not hung or _under_stop_limit(analyzed, hung) else None
        outlook = Outlook(is_certain=is_certain, is_over=is_over, stop_limit_s=stop_limit_s)
        report = explain_hang(analyzed, hung, context, outlook)
        overdue_s = min(
            each.age_s - (self._limits.hang_limit_s if is_certain else _limit_of(each, self._limits))
            for each in affected
        )
        return replace(report, must_end=must_end, facts={**report.facts, "overdue_s": round(overdue_s, 1)})

    def _is_news(self, each: WaitAnalysis, *, must_end: bool) -> bool:
        last = self._reported.get(each.now.rank)
        if last is None or last.progress_at != self._progress_at(each.now.rank, each.now.heartbeat):
            return True
        return (must_end and not last.must_end) or each.age_s >= _REPORT_AGAIN * last.age_s

    def _forget_report_if_over(self, rank: int, heartbeat: Heartbeat) -> None:
        last = self._reported.get(rank)
        if last is not None and (progress_at := self._progress_at(rank, heartbeat)) != last.progress_at:
            self._limits.learn_pause(progress_at - last.progress_at)
            del self._reported[rank]

    def _probe(
        self, seen: Sequence[tuple[RankStatus, Heartbeat]], now: float, context: Callable[[], FailureContext]
    ) -> list[WaitAnalysis] | None:
        """Probe the ranks, and compare with the previous probe; None if this is the first."""
        observed = probe_ranks(seen, self._files, self._read)
        for rank in observed:
            self._note_collectives(rank.rank, rank.collectives)
        before, self._before = self._before, {each.rank: each for each in observed}
        self._pause_s = min(2 * self._pause_s, self._max_pause_s(seen, now)) if before else _FIRST_PAUSE_S
        self._next_probe_at = time.monotonic() + self._pause_s
        if not before:
            return None
        world_size = context().world_size
        analyzed = [self._analyze(before[each.rank], each, world_size) for each in observed]
        for each in analyzed:
            if each.is_busy:
                self._activity.mark_active(each.now.heartbeat.pid, each.now.at)
        return analyzed

    def _analyze(self, before: RankObservation, now: RankObservation, world_size: int) -> WaitAnalysis:
        progress_at = self._progress_at(now.rank, now.heartbeat)
        active_at = self._activity.active_at(now.heartbeat.pid, progress_at, now.at)
        return analyze_wait(
            before,
            now,
            now.at - progress_at,
            now.at - active_at,
            world_size=world_size,
            num_collectives=self._num_collectives.get(now.rank, 0),
        )

    def _note_collectives(self, rank: int, collectives: Sequence[Collective]) -> None:
        """Take a collective that has begun or ended for progress."""
        last, before = max(collectives, key=lambda each: each.started, default=None), self._last_collectives.get(rank)
        if last is None or last == before:
            return
        has_ended = before is not None and (last.group, last.number) == (before.group, before.number)
        # The recorder's clock may be set, so only now is it compared with ours.
        began_ago_s = max(0.0, time.time() - last.started)
        self._collectives_at[rank] = time.monotonic() - (0.0 if has_ended else began_ago_s)
        self._last_collectives[rank] = last
        self._num_collectives[rank] = max(last.number, self._num_collectives.get(rank, 0))

    def _with_stacks(self, analyzed: WaitAnalysis) -> WaitAnalysis:
        if analyzed.now.state is None or not analyzed.now.state.is_stopped:
            return analyzed
        return analyzed._replace(now=with_stacks_if_stopped(analyzed.now, self._files(analyzed.now.rank)))

    def _max_pause_s(self, seen: Sequence[tuple[RankStatus, Heartbeat]], now: float) -> float:
        """Return the longest pause between probes; it grows once a phase has taken very long."""
        age_s = max(now - self._progress_at(status.rank, heartbeat) for status, heartbeat in seen)
        is_long = age_s > 2 * _TIMES_LONGER * self._limits.hang_limit_s
        return max(_MAX_PAUSE_S, _PAUSE_SHARE * age_s) if is_long else _MAX_PAUSE_S

    def _forget_probes(self) -> None:
        self._before = {}
        self._next_probe_at = 0.0

    def _progress_at(self, rank: int, heartbeat: Heartbeat) -> float:
        """Return when a rank last made progress, as far as we know."""
        return max(heartbeat.since, self._collectives_at.get(rank, 0.0), self._started_at)

    def _may_hang(self, status: RankStatus, heartbeat: Heartbeat, now: float) -> bool:
        """Is it to be probed? A probe disturbs a rank, so a busy one only once its phase has taken very long.

        Collectives are seen by a probe alone: a script that shows no other sign of life is probed after S in any case.
        """
        if status.exit_code is not None:
            return False
        progress_at = self._progress_at(status.rank, heartbeat)
        active_at = self._activity.active_at(heartbeat.pid, progress_at, now)
        limit_s = self._limits.hang_limit_s
        if now - active_at > limit_s or (is_setup(heartbeat) and now - progress_at > limit_s):
            return True
        return now - progress_at > self._limits.of(heartbeat, self._num_collectives.get(status.rank, 0))


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
    is_over = all(each.age_s > patience * _limit_of(each, limits) for each in waiting)
    return set() if is_over else None


def has_passed_stop_limit(
    analyzed: Sequence[WaitAnalysis], hung: Collection[int], limits: PhaseLimits, stop_limit_s: float
) -> bool:
    """Have hung ranks shown no sign of life for so long that the job is to end? A busy one may take ten times as long.

    Args:
        analyzed: the ranks of this machine.
        hung: as `find_hung_ranks` returns it.
        limits: how long each phase may take.
        stop_limit_s: the limit, unless that of the phase is longer.
    """
    if not hung:
        waiting = [each for each in analyzed if each.peer_wait is not None]
        return all(each.age_s > max(stop_limit_s, _limit_of(each, limits)) for each in waiting)
    for each in _under_stop_limit(analyzed, hung):
        allowed_s = max(stop_limit_s, _limit_of(each, limits))
        if each.idle_s > allowed_s or each.age_s > _TIMES_LONGER * allowed_s:
            return True
    return False


def _under_stop_limit(analyzed: Sequence[WaitAnalysis], hung: Collection[int]) -> list[WaitAnalysis]:
    """Return the hung ranks to which the stop limit applies: not a script that trains nothing and no rank waits for."""
    is_needed = any(each.peer_wait is not None for each in analyzed)
    return [each for each in analyzed if each.now.rank in hung and (is_needed or _is_training(each.now.heartbeat))]


def _is_overdue(analyzed: WaitAnalysis, limits: PhaseLimits, *, is_needed: bool) -> bool:
    """`is_needed`: another rank waits for this one."""
    state, heartbeat = analyzed.now.state, analyzed.now.heartbeat
    if state is not None and state.is_traced:
        return False
    if not is_needed and not _is_training(heartbeat) and not _has_begun_to_communicate(analyzed):
        return False
    limit_s = _limit_of(analyzed, limits)
    is_idle = analyzed.idle_s > limits.hang_limit_s
    return analyzed.age_s > (limit_s if is_idle else _TIMES_LONGER * limit_s)


def _is_training(heartbeat: Heartbeat) -> bool:
    """If a script does not train, or no longer does, it is unknown how long it may take."""
    return heartbeat.phase != Phase.SCRIPT or (heartbeat.step > 0 and Phase.COMPUTING not in heartbeat.longest_s)


def _has_begun_to_communicate(analyzed: WaitAnalysis) -> bool:
    return is_setup(analyzed.now.heartbeat) and analyzed.num_collectives >= _UNDER_WAY


def _limit_of(analyzed: WaitAnalysis, limits: PhaseLimits) -> float:
    return limits.of(analyzed.now.heartbeat, analyzed.num_collectives)


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
