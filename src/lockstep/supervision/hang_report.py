"""Hang reports: which rank is stuck where, which ranks wait for it, and what to do about it.

Reports are made from observations alone (`lockstep.supervision.rank_probe`), so every case can be tested without a
process that hangs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.config.plurals import number_noun
from lockstep.errors import EXIT_HANG
from lockstep.supervision.collective_mismatch import SAME_ORDER, find_mismatch
from lockstep.supervision.failure_report import FailureContext, FailureVerdict, describe_place
from lockstep.supervision.heartbeat import Phase
from lockstep.supervision.linux_processes import signal_name
from lockstep.supervision.rank_probe import RankObservation
from lockstep.supervision.stack_dumps import StackFrame, user_frame
from lockstep.supervision.thread_waits import find_deadlock
from lockstep.supervision.wait_analysis import (
    PeerWait,
    StuckDataWorker,
    WaitAnalysis,
    find_stuck_data_worker,
    is_waiting_for_data,
)


class Outlook(NamedTuple):
    """Whether ranks that hang could go on by themselves."""

    is_certain: bool = True  # they cannot
    is_over: bool = False  # they could, but have not for so long that the job ends
    stop_limit_s: float | None = None  # after which it does; None: never

    @property
    def words(self) -> str:
        """A sentence for messages; empty if the hang is certain."""
        if self.is_certain:
            return ""
        if self.is_over:
            return f"The job ends, after more than {self.stop_limit_s:g} s without a sign of life (--hang-stop)"
        healthy = "If it is meant to take this long, nothing is wrong; --hang-limit sets when this is reported"
        if self.stop_limit_s is None:
            return healthy
        return f"{healthy}. The job ends only after {self.stop_limit_s:g} s without a sign of life (--hang-stop)"


_CERTAIN = Outlook()


@dataclass(frozen=True)
class HangReport:
    """The explanation of a hang."""

    verdict: FailureVerdict
    facts: Mapping[str, Any] = field(default_factory=dict)  # for programs: kind, place, stacks of all ranks
    must_end: bool = False  # the ranks cannot go on, or have not for very long


class _Diagnosis(NamedTuple):
    """What is wrong with one stuck rank."""

    kind: str  # for programs
    words: str  # to follow "rank 1 of 2 on host "
    remedy: str
    frame: StackFrame | None = None
    is_from_outside: bool = False
    facts: Mapping[str, Any] = {}


def explain_hang(
    analyzed: Sequence[WaitAnalysis],
    hung_ranks: Collection[int],
    context: FailureContext,
    outlook: Outlook = _CERTAIN,
) -> HangReport:
    """Explain a hang in one paragraph.

    Args:
        analyzed: all ranks of this machine.
        hung_ranks: those that are overdue and do not wait for another rank; none if all ranks wait or have ended.
        context: the job and the machine.
        outlook: whether they could go on by themselves.
    """
    observed = [each.now for each in analyzed]
    waits = {each.now.rank: each.peer_wait for each in analyzed if each.peer_wait is not None}
    hung = [each for each in analyzed if each.now.rank in hung_ranks] or [
        each for each in analyzed if each.now.has_ended
    ]
    if not hung:
        if context.world_size > len(observed):
            return _explain_other_machine(analyzed, waits, context, outlook)
        return _explain_mismatch(analyzed, waits, context, outlook)
    worst, *others = sorted(hung, key=_age, reverse=True)
    diagnosis, first = _diagnose(worst, outlook), worst.now
    sentences = [f"{_named(first, context)} {diagnosis.words}"]
    for other in others:
        sentences.append(f"Rank {other.now.rank} {_diagnose(other, outlook).words}")
    waiting = {rank: wait for rank, wait in waits.items() if rank not in {each.now.rank for each in hung}}
    if waiting:
        words = _describe_waits(waiting)
        sentences.append(words[0].upper() + words[1:])
    sentences += [sentence for sentence in (diagnosis.remedy, outlook.words) if sentence]
    at = f" at {diagnosis.frame.place}" if diagnosis.frame is not None else ""
    verdict = FailureVerdict(
        EXIT_HANG,
        [". ".join(sentences)],
        f"hang, {diagnosis.kind}{at}",
        first.rank,
        tuple(sorted(waiting)),
        is_from_outside=diagnosis.is_from_outside,
    )
    phase = first.heartbeat.phase
    return HangReport(verdict, _facts(diagnosis.kind, phase, diagnosis.frame, observed, waits, diagnosis.facts))


def _diagnose(hung: WaitAnalysis, outlook: Outlook) -> _Diagnosis:
    rank = hung.now
    if rank.has_ended:
        step = f" after step {rank.heartbeat.step}" if rank.heartbeat.step else ""
        return _Diagnosis("early exit", f"has finished its script{step} while other ranks still need it", SAME_ORDER)
    verb = "been stuck" if outlook.is_certain else "made no progress"
    stuck = f"has {verb}{describe_place(rank.heartbeat)} for {hung.age_s:.0f} s: it"
    state, pid = rank.state, rank.heartbeat.pid
    if state is not None and state.is_stopped:
        return _Diagnosis(
            "stopped",
            f"{stuck} is stopped (SIGSTOP, pid {pid}), {_place(rank.frames)}",
            f"`kill -CONT {pid}` resumes it; a debugger, a shell's job control or a scheduler may have stopped it",
            user_frame(rank.frames),
            is_from_outside=True,
        )
    if state is not None and state.state == "D":
        blocked = f" in the {rank.blocked_in}" if rank.blocked_in else ""
        return _Diagnosis(
            "blocked in the kernel",
            f"{stuck} is blocked in the kernel{blocked} and receives no signals, so its line is unknown (pid {pid})",
            "Check the disk or the network file system behind it",
        )
    if is_waiting_for_data(rank):
        return _diagnose_data_loading(rank, stuck)
    frame, place = user_frame(rank.frames), _place(rank.frames)
    if not rank.has_answered:
        return _Diagnosis(
            "native call",
            f"{stuck} is in a native call that holds the interpreter lock, {place}",
            "No other Python thread of that rank can run meanwhile; look for a deadlock or an endless loop in that "
            "library",
            frame,
        )
    if rank.reads_own_pipe:
        return _Diagnosis(
            "pipe without a writer",
            f"{stuck} reads a pipe that no other process can write to, {place}",
            "Check what should write to it: a process that has ended, or one that the pipe was not passed to",
            frame,
        )
    if deadlock := find_deadlock(rank):
        return _Diagnosis(
            "deadlock",
            f"{stuck} {_describe_deadlock(rank, deadlock)}",
            "Take several locks in the same order everywhere, and take no lock twice that is not a threading.RLock",
            frame,
        )
    if rank.blocked_in:
        return _Diagnosis(
            "blocked file",
            f"{stuck} is blocked in the {rank.blocked_in}, {place}",
            "Check what should write to it or serve it",
            frame,
        )
    doing = "is busy" if hung.is_busy else "waits or sleeps"
    return _Diagnosis("endless" if hung.is_busy else "idle", f"{stuck} {doing} {place}", "", frame)


def _describe_deadlock(rank: RankObservation, deadlock: Sequence[StackFrame]) -> str:
    lock, place = "a lock that none of its threads can release", _place(rank.frames)
    others = " and ".join(each.place for each in deadlock if each not in rank.frames)
    if set(deadlock).isdisjoint(rank.frames):
        return f"waits {place} for another thread, which waits for {lock}, at {others}"
    return f"waits for {lock}, {place}" + (f", and another thread waits for one at {others}" if others else "")


def _diagnose_data_loading(rank: RankObservation, stuck: str) -> _Diagnosis:
    worker = find_stuck_data_worker(rank)
    if worker is None:
        sample = rank.heartbeat.sample
        doing = "waits for data" if sample is None else f"reads sample {sample}"
        blocked = f", blocked in the {rank.blocked_in}" if rank.blocked_in else ""
        lock = "" if rank.has_answered else ", in a native call that holds the interpreter lock"
        return _Diagnosis(
            "data",
            f"{stuck} {doing}, {_place(rank.frames)}{blocked}{lock}",
            "Check what that line waits for",
            user_frame(rank.frames),
            facts={"sample": sample},
        )
    process = worker.process
    sample = None if process.data_worker is None else process.data_worker.sample
    frame = worker.frame or user_frame(rank.frames)
    reads = "" if sample is None else f", reading sample {sample}"
    words = f"{stuck} waits for its data worker {worker.number} (pid {process.pid}), which {_describe(worker)}{reads}"
    if worker.frame is not None:
        words += f", at {worker.frame.place} in {worker.frame.function}"
    elif frame is not None:
        words += f"; it waits at {frame.place}"
    is_stopped = process.state is not None and process.state.is_stopped
    return _Diagnosis(
        "data",
        words,
        f"`kill -CONT {process.pid}` resumes it" if is_stopped else "Check what that worker does there",
        frame,
        is_from_outside=is_stopped,
        facts={"sample": sample, "worker": worker.number, "worker_pid": process.pid},
    )


def _describe(worker: StuckDataWorker) -> str:
    state = worker.process.state
    if state is None or state.is_dead:
        killed = f", killed by {signal_name(state.exit_signal)}" if state is not None and state.exit_signal else ""
        return f"is dead{killed}"
    if state.is_stopped:
        return "is stopped (SIGSTOP)"
    return f"is blocked in the {worker.process.blocked_in}" if worker.process.blocked_in else "makes no progress"


def _explain_mismatch(
    analyzed: Sequence[WaitAnalysis], waits: Mapping[int, PeerWait], context: FailureContext, outlook: Outlook
) -> HangReport:
    """Explain a hang in which all ranks of the job wait for each other."""
    observed = [each.now for each in analyzed]
    found = find_mismatch(observed, waits)
    first = next((each for each in observed if each.rank in found.ranks), observed[0])
    host = f" on {context.host}" if context.host else ""
    is_same_collective = len(set(waits.values())) <= 1
    is_receive = all(wait.is_receive for wait in waits.values())
    if is_receive:
        heading = f"all {context.world_size} ranks{host} have been waiting to receive, and none sends,"
    elif is_same_collective:
        heading = f"all {context.world_size} ranks{host} have been waiting in the same collective"
    else:
        heading = f"all {context.world_size} ranks{host} have been waiting for each other in different collectives"
    places = [f"rank {each.rank} waits{describe_place(each.heartbeat)} in {_wait_of(each, waits)}" for each in observed]
    sentences = [f"{heading} for {max(map(_age, analyzed)):.0f} s: " + "; ".join(places)]
    if found.words:
        sentences.append(f"According to torch's flight recorder, {found.words}")
    elif found.ranks:
        sentences.append(f"Rank {found.ranks[0]} seems to have called different collectives than the others")
    if is_receive:
        sentences.append("Let one rank of each pair send before it receives")
    elif is_same_collective and not found.words and not found.ranks:
        sentences.append("Check the tensors' sizes and the network")
    else:
        sentences.append(SAME_ORDER)
    if outlook.words:
        sentences.append(outlook.words)
    where = ", ".join(f"rank {each.rank} in {_wait_of(each, waits)}" for each in observed)
    verdict = FailureVerdict(
        EXIT_HANG,
        [". ".join(sentences)],
        f"hang, different collectives: {where}",
        found.ranks[0] if found.ranks else None,
        tuple(each.rank for each in observed if each.rank not in found.ranks),
    )
    wait = waits.get(first.rank)
    frame = None if wait is None else wait.frame
    return HangReport(verdict, _facts("mismatch", first.heartbeat.phase, frame, observed, waits, {}))


def _explain_other_machine(
    analyzed: Sequence[WaitAnalysis], waits: Mapping[int, PeerWait], context: FailureContext, outlook: Outlook
) -> HangReport:
    """Explain a hang in which all ranks of this machine wait, so that its cause is on another one."""
    observed = [each.now for each in analyzed]
    longest = max(analyzed, key=_age)
    message = (
        f"all ranks of this machine ({context.host or 'this one'}) have been waiting for a rank on another machine for "
        f"{longest.age_s:.0f} s: {_describe_waits(waits)}. See the other machines' output"
    )
    message += f". {outlook.words}" if outlook.words else ""
    verdict = FailureVerdict(EXIT_HANG, [message], "hang, of a rank on another machine", is_from_outside=True)
    return HangReport(verdict, _facts("elsewhere", longest.now.heartbeat.phase, None, observed, waits, {}))


def _named(observed: RankObservation, context: FailureContext) -> str:
    return f"rank {observed.rank} of {context.world_size}{f' on {context.host}' if context.host else ''}"


def _wait_of(observed: RankObservation, waits: Mapping[int, PeerWait]) -> str:
    wait = waits.get(observed.rank)
    return "an unknown place" if wait is None else wait.words


def _describe_waits(waits: Mapping[int, PeerWait]) -> str:
    """Say which ranks wait for the hung rank, grouping those that wait at the same place."""
    by_place: dict[str, list[int]] = {}
    for rank, wait in sorted(waits.items()):
        by_place.setdefault(wait.words, []).append(rank)
    return "; ".join(
        f"{number_noun('rank', ranks)} {'waits' if len(ranks) == 1 else 'wait'} for it in {place}"
        for place, ranks in by_place.items()
    )


def _place(frames: Sequence[StackFrame]) -> str:
    """Name the user's line, and the innermost one if it is another."""
    frame = user_frame(frames)
    if frame is None:
        return f"at {frames[0].place} in {frames[0].function}" if frames else "at an unknown line"
    inner = "" if frames[0] == frame else f" (inside {frames[0].function}, {frames[0].place})"
    return f"at {frame.place} in {frame.function}{inner}"


def _age(analyzed: WaitAnalysis) -> float:
    return analyzed.age_s


def _facts(
    kind: str,
    phase: Phase,
    frame: StackFrame | None,
    observed: Sequence[RankObservation],
    waits: Mapping[int, PeerWait],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "hang": kind,
        "phase": phase.name.lower(),
        "file": None if frame is None else frame.file,
        "line": None if frame is None else frame.line,
        **more,
        "waiting": {str(rank): wait.words for rank, wait in waits.items()},
        "stacks": {str(each.rank): each.stacks for each in observed},
        "data_workers": {
            str(each.rank): {str(child.pid): child.stacks for child in each.children}
            for each in observed
            if each.children
        },
        "collectives": {
            str(each.rank): [collective._asdict() for collective in each.collectives]
            for each in observed
            if each.collectives
        },
    }
