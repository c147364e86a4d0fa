"""What to say about a hang: who is stuck where, who waits for it, and what may help.

From observations alone (`lockstep.supervision.examination`), so that every case can be shown without a hanging process.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lockstep.errors import EXIT_HANG
from lockstep.supervision.examination import Observation
from lockstep.supervision.failure import Scene, Verdict, place_in_words
from lockstep.supervision.mismatch import find_mismatch
from lockstep.supervision.process import signal_name
from lockstep.supervision.pulse import Phase
from lockstep.supervision.stacks import Frame, users_frame
from lockstep.supervision.standing import Judged, Meeting, StuckWorker, stuck_worker, waits_for_data

_SAME_ORDER = (
    "Every rank must make the same collectives in the same order: look for a branch, a loop's length or an early "
    "`continue` that depends on the rank or its data"
)


@dataclass(frozen=True)
class Hang:
    verdict: Verdict
    facts: Mapping[str, Any] = field(default_factory=dict)  # for programs: kind, place, stacks of all ranks


class _Account(NamedTuple):
    """Of one stuck rank."""

    kind: str  # a word, for programs
    words: str  # to follow "rank 1 of 2 on host "
    remedy: str
    frame: Frame | None = None
    is_from_outside: bool = False
    more: Mapping[str, Any] = {}


def explain_hang(judged: Sequence[Judged], accused: Collection[int], scene: Scene) -> Hang:
    """`accused`: ranks that are overdue and wait for no other rank; none: all ranks wait, or have ended."""
    observed = [each.now for each in judged]
    busy = {each.now.rank for each in judged if each.is_busy}
    meetings = {each.now.rank: each.meeting for each in judged if each.meeting is not None}
    culprits = [each for each in observed if each.rank in accused]
    ended = [each for each in observed if each.has_ended]
    if not culprits and not ended:
        if scene.world_size > len(observed):
            return _elsewhere(observed, meetings, scene)
        return _mismatch(observed, meetings, scene)
    first, *others = sorted(culprits or ended, key=lambda each: each.reading.since)
    account = _account(first, is_busy=first.rank in busy)
    sentences = [f"{_named(first, scene)} {account.words}"]
    for other in others:
        sentences.append(f"So does rank {other.rank}: it {_account(other, is_busy=other.rank in busy).words}")
    waiters = {rank: met for rank, met in meetings.items() if rank not in {each.rank for each in (culprits or ended)}}
    if waiters:
        sentences.append(_waiting(waiters))
    sentences.append(account.remedy)
    at = f" at {account.frame.place}" if account.frame is not None else ""
    verdict = Verdict(
        EXIT_HANG,
        [". ".join(sentences)],
        f"hang, {account.kind}{at}",
        first.rank,
        tuple(sorted(waiters)),
        is_from_outside=account.is_from_outside,
    )
    return Hang(verdict, _facts(account.kind, first.reading.phase, account.frame, observed, meetings, account.more))


def _account(culprit: Observation, *, is_busy: bool) -> _Account:
    where = place_in_words(culprit.reading)
    if culprit.has_ended:
        step = f" after step {culprit.reading.step}" if culprit.reading.step else ""
        return _Account("early exit", f"has finished its script{step} while other ranks still need it", _SAME_ORDER)
    hangs = f"hangs{where} for {_age(culprit)}: it"
    state, pid = culprit.state, culprit.reading.pid
    if state is not None and state.is_stopped:
        return _Account(
            "stopped",
            f"{hangs} is stopped (SIGSTOP, pid {pid}), {_place(culprit.frames)}",
            f"`kill -CONT {pid}` lets it go on; a debugger, a shell's job control or a scheduler may have stopped it",
            users_frame(culprit.frames),
            is_from_outside=True,
        )
    if state is not None and state.state == "D":
        blocked = f" in the {culprit.blocked_in}" if culprit.blocked_in else ""
        return _Account(
            "blocked in the kernel",
            f"{hangs} is blocked in the kernel{blocked} and hears no signal, so its line is not known (pid {pid})",
            "Look at the disk or the network file system behind it",
        )
    if waits_for_data(culprit):
        return _data_account(culprit, hangs)
    frame = users_frame(culprit.frames)
    at = _place(culprit.frames)
    if not culprit.has_answered:
        return _Account(
            "native call",
            f"{hangs} is in a native call that holds the interpreter lock, {at}",
            "No other Python thread of that rank can run meanwhile; look for a deadlock or an endless loop in that "
            "library",
            frame,
        )
    if culprit.blocked_in:
        return _Account(
            "blocked file",
            f"{hangs} is blocked in the {culprit.blocked_in}, {at}",
            "Look at who should write to or serve it",
            frame,
        )
    state_words = "is busy there, but it has taken far longer than before" if is_busy else "does not get any further"
    return _Account(
        "endless" if is_busy else "idle",
        f"{hangs} is {at}, and {state_words}",
        "If it is meant to take so long, give a larger --hang-limit",
        frame,
    )


def _data_account(culprit: Observation, hangs: str) -> _Account:
    worker = stuck_worker(culprit)
    if worker is None:
        sample = culprit.reading.sample
        doing = "waits for data" if sample is None else f"reads sample {sample}"
        blocked = f", blocked in the {culprit.blocked_in}" if culprit.blocked_in else ""
        lock = "" if culprit.has_answered else ", in a native call that holds the interpreter lock"
        return _Account(
            "data",
            f"{hangs} {doing}, {_place(culprit.frames)}{blocked}{lock}",
            "Look at what that line waits for",
            users_frame(culprit.frames),
            more={"sample": sample},
        )
    pulse = worker.child.pulse
    sample = None if pulse is None else pulse.sample
    frame = worker.frame or users_frame(culprit.frames)
    reads = "" if sample is None else f", reading sample {sample}"
    words = f"{hangs} waits for its data worker {worker.number} (pid {worker.child.pid}), which {_fate(worker)}{reads}"
    if worker.frame is not None:
        words += f", at {worker.frame.place} in {worker.frame.function}"
    elif frame is not None:
        words += f"; it does so at {frame.place}"
    is_stopped = worker.child.state is not None and worker.child.state.is_stopped
    return _Account(
        "data",
        words,
        f"`kill -CONT {worker.child.pid}` lets it go on" if is_stopped else "Look at what that worker does there",
        frame,
        is_from_outside=is_stopped,
        more={"sample": sample, "worker": worker.number, "worker_pid": worker.child.pid},
    )


def _fate(worker: StuckWorker) -> str:
    state = worker.child.state
    if state is None or state.is_dead:
        killed = f", killed by {signal_name(state.exit_signal)}" if state is not None and state.exit_signal else ""
        return f"is dead{killed}"
    if state.is_stopped:
        return "is stopped (SIGSTOP)"
    return f"is blocked in the {worker.child.blocked_in}" if worker.child.blocked_in else "does not get any further"


def _mismatch(observed: Sequence[Observation], meetings: Mapping[int, Meeting], scene: Scene) -> Hang:
    found = find_mismatch(observed, meetings)
    first = next((each for each in observed if each.rank in found.ranks), observed[0])
    met = meetings.get(first.rank)
    host = f" on {scene.host}" if scene.host else ""
    are_apart = len(set(meetings.values())) > 1
    if are_apart:
        heading = f"all {scene.world_size} ranks{host} wait for each other in different collectives"
    else:
        heading = f"all {scene.world_size} ranks{host} wait in the same collective, and none gets any further"
    places = [f"rank {each.rank} waits{place_in_words(each.reading)} in {_met(meetings, each)}" for each in observed]
    blame = found.words or "".join(f"rank {rank} has left the common order" for rank in found.ranks[:1])
    sentences = [f"{heading} for {_age(min(observed, key=_since))}: " + "; ".join(places)]
    sentences += [f"By torch's flight recorder {blame}" if found.words else f"It seems that {blame}"] if blame else []
    sentences.append(
        _SAME_ORDER if len(set(meetings.values())) > 1 or blame else "Look at the tensors' sizes and at the network"
    )
    where = ", ".join(f"rank {each.rank} in {_met(meetings, each)}" for each in observed)
    verdict = Verdict(
        EXIT_HANG,
        [". ".join(sentences)],
        f"hang, different collectives: {where}",
        found.ranks[0] if found.ranks else None,
        tuple(each.rank for each in observed if each.rank not in found.ranks),
    )
    frame = None if met is None else met.frame
    return Hang(verdict, _facts("mismatch", first.reading.phase, frame, observed, meetings, {}))


def _elsewhere(observed: Sequence[Observation], meetings: Mapping[int, Meeting], scene: Scene) -> Hang:
    longest = min(observed, key=_since)
    message = (
        f"all ranks of this machine ({scene.host or 'this one'}) wait for a rank on another machine, for "
        f"{_age(longest)}: {_waiting(meetings)}. See the other machines' words"
    )
    verdict = Verdict(EXIT_HANG, [message], "hang, of a rank on another machine", is_from_outside=True)
    return Hang(verdict, _facts("elsewhere", longest.reading.phase, None, observed, meetings, {}))


def _named(observed: Observation, scene: Scene) -> str:
    return f"rank {observed.rank} of {scene.world_size}{f' on {scene.host}' if scene.host else ''}"


def _met(meetings: Mapping[int, Meeting], observed: Observation) -> str:
    met = meetings.get(observed.rank)
    return "an unknown place" if met is None else met.words


def _waiting(meetings: Mapping[int, Meeting]) -> str:
    """Who waits for it: ranks at the same place in one breath."""
    by_place: dict[str, list[int]] = {}
    for rank, met in sorted(meetings.items()):
        by_place.setdefault(met.words, []).append(rank)
    return "; ".join(
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))} "
        f"{'waits' if len(ranks) == 1 else 'wait'} for it in {place}"
        for place, ranks in by_place.items()
    )


def _place(frames: Sequence[Frame]) -> str:
    """The user's line, and where that led to if it is not the innermost one."""
    frame = users_frame(frames)
    if frame is None:
        return f"at {frames[0].place} in {frames[0].function}" if frames else "at an unknown line"
    inner = "" if frames[0] == frame else f" (inside {frames[0].function}, {frames[0].place})"
    return f"at {frame.place} in {frame.function}{inner}"


def _since(observed: Observation) -> float:
    return observed.reading.since


def _age(observed: Observation) -> str:
    return f"{observed.at - observed.reading.since:.0f} s"


def _facts(
    kind: str,
    phase: Phase,
    frame: Frame | None,
    observed: Sequence[Observation],
    meetings: Mapping[int, Meeting],
    more: Mapping[str, Any],
) -> dict[str, Any]:
    return {
        "hang": kind,
        "phase": phase.name.lower(),
        "file": None if frame is None else frame.file,
        "line": None if frame is None else frame.line,
        **more,
        "waiting": {str(rank): met.words for rank, met in meetings.items()},
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
