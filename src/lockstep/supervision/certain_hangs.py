"""Decides whether ranks hang for certain: they cannot go on, however long one waits.

[Note: certain hangs]

To stop a healthy job costs more than to notice a hang late. So ranks that only take longer than before are reported,
and a job is stopped at the hang limit for these reasons alone, each of which must have lasted for the limit:

- a process is stopped by a signal, or waits for a data worker that is stopped or was killed;
- a rank reads a pipe that nobody but itself has open for writing;
- a rank's threads wait for each other's locks;
- all ranks wait, and one that they wait for has ended;
- all ranks wait to receive, so none sends;
- all ranks wait, and torch's flight recorder shows different collectives under the same number;
- all ranks wait on the CPU, one of them in a collective that another one has not begun and, waiting, cannot begin.

No other thread of a rank may be able to help it: any that is not known to wait for work counts as able to
(`thread_waits`).
"""

import time
from collections.abc import Sequence

from lockstep.supervision.flight_recorder import Collective
from lockstep.supervision.heartbeat import Phase
from lockstep.supervision.rank_probe import RankObservation
from lockstep.supervision.thread_waits import can_be_helped, find_deadlock
from lockstep.supervision.wait_analysis import (
    WaitAnalysis,
    find_stuck_data_worker,
    is_waiting_for_data,
)


def find_certain_hang(
    analyzed: Sequence[WaitAnalysis], hang_limit_s: float, *, is_one_machine: bool
) -> set[int] | None:
    """Return the ranks that hang for certain: [Note: certain hangs].

    An empty set means that all ranks wait for each other, or for one that has ended; None that no hang is certain.

    Args:
        analyzed: the ranks of this machine.
        hang_limit_s: how long they must have been stuck.
        is_one_machine: these are all ranks of the job.
    """
    stuck = {each.now.rank for each in analyzed if each.idle_s > hang_limit_s and _is_stuck_alone(each.now)}
    if stuck:
        return stuck
    waiting = [each for each in analyzed if not each.now.has_ended]
    if not waiting or any(each.peer_wait is None for each in waiting):
        return None
    if is_one_machine and all(_only_receives(each, hang_limit_s) for each in waiting):
        return set()
    awaited = [_awaited(each.now.collectives, hang_limit_s) for each in waiting]
    if _have_different_collectives([each.now for each in waiting], awaited):
        return set()
    ended = [each for each in analyzed if each.now.has_ended]
    is_blocked = all(
        _is_blocked(each, first, hang_limit_s) for each, first in zip(waiting, awaited, strict=True)
    ) and all(each.idle_s > hang_limit_s for each in ended)  # one that has ended its script may still be busy
    if not is_blocked or not is_one_machine:
        return None
    return set() if ended or _has_not_begun([each.now for each in waiting], awaited) else None


def _is_stuck_alone(rank: RankObservation) -> bool:
    """Can it not go on, whatever the other ranks do?"""
    if rank.has_ended or rank.state is None or rank.state.is_traced:
        return False
    if rank.state.is_stopped:
        return True
    if is_waiting_for_data(rank) and (worker := find_stuck_data_worker(rank)) is not None:
        state = worker.process.state
        return state is not None and (state.is_stopped or (state.is_dead and state.exit_signal != 0))
    return bool(find_deadlock(rank)) or (rank.reads_own_pipe and not can_be_helped(rank))


def _only_receives(analyzed: WaitAnalysis, hang_limit_s: float) -> bool:
    wait = analyzed.peer_wait
    is_receiving = wait is not None and wait.is_receive
    return is_receiving and analyzed.idle_s > hang_limit_s and not can_be_helped(analyzed.now)


def _awaited(collectives: Sequence[Collective], hang_limit_s: float) -> Collective | None:
    """Return the oldest collective that a rank has begun and not finished, if it began that long ago."""
    unfinished = [each for each in collectives if not each.is_done]
    oldest = min(unfinished, key=lambda each: each.started, default=None)
    return oldest if oldest is not None and oldest.started < time.time() - hang_limit_s else None


def _have_different_collectives(waiting: Sequence[RankObservation], awaited: Sequence[Collective | None]) -> bool:
    """Did ranks call different collectives where one of them still waits?"""
    return any(
        first is not None and _cannot_meet(first, each)
        for first in awaited
        for other in waiting
        for each in other.collectives
    )


def _cannot_meet(one: Collective, other: Collective) -> bool:
    if (one.group, one.number) != (other.group, other.number):
        return False
    if one.backend != other.backend or "coalesced" in one.name + other.name:
        return False
    return one.signature != other.signature


def _is_blocked(analyzed: WaitAnalysis, awaited: Collective | None, hang_limit_s: float) -> bool:
    """Does a rank wait for others in a collective or a gradient exchange, with no other thread that could end that?"""
    if can_be_helped(analyzed.now):
        return False
    if awaited is not None and awaited.backend == "nccl":  # its host may spin
        return True
    is_waiting = awaited is not None or analyzed.now.heartbeat.phase == Phase.EXCHANGING
    return is_waiting and analyzed.idle_s > hang_limit_s


def _has_not_begun(waiting: Sequence[RankObservation], awaited: Sequence[Collective | None]) -> bool:
    """Does a rank wait for another one in a collective, or a gradient exchange, that the other has not begun?

    With NCCL that is unknown: a rank that waits for its GPU may begin it later.
    """
    if any(each.backend != "gloo" for rank in waiting for each in rank.collectives):
        return False
    exchanging = {rank.heartbeat.phase == Phase.EXCHANGING for rank in waiting}
    return len(exchanging) == 2 or any(
        first is not None and any(_is_behind(other, first) for other in waiting) for first in awaited
    )


def _is_behind(rank: RankObservation, collective: Collective) -> bool:
    """Is it a member of the collective's group that has not begun the collective?"""
    numbers = [each.number for each in rank.collectives if each.group == collective.group]
    return bool(numbers) and max(numbers) < collective.number
