"""What a probed rank is doing: waiting for other ranks, waiting for data, or working by itself."""

import linecache
import time
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.supervision.cpu_activity import BUSY_SHARE
from lockstep.supervision.flight_recorder import Collective
from lockstep.supervision.heartbeat import Phase
from lockstep.supervision.rank_probe import ChildProcess, RankObservation
from lockstep.supervision.stack_dumps import StackFrame, ThreadStack, parse_stacks, user_frame

# Where a stack is when a rank waits for others: in torch's collectives, or in these files of lockstep.
_COLLECTIVES = ("torch/distributed/", "torch/nn/parallel/distributed.py")
_FILE_ACCESS = "torch/distributed/checkpoint/"  # there, a rank reads or writes files by itself
_OWN_COLLECTIVES = (
    "engine/comm_thread.py",
    "world/collectives.py",
    "world/object_collectives.py",
    "world/process_group.py",
    "launcher/env_rendezvous.py",
    "launcher/job_store.py",
    "launcher/tcp_store.py",
)
# Frames between a caller and what it waits for, which carry no information.
_WRAPPERS = ("torch/_ops.py", "torch/utils/_contextlib.py", "/threading.py", "/contextlib.py", "/concurrent/futures/")
_SAVER = "/lockstep/checkpoint/async_saver.py"  # a save is written by a thread, which meets those of the other ranks
_BACKWARD = "torch/autograd/graph.py"
_DATA_LOADING = ("torch/utils/data/", "/multiprocessing/")
_RECEIVES = ("recv", "recv_object_list")
_LATE_S = 1.0  # on a GPU, a collective takes less than this unless it has to wait for its peers


class PeerWait(NamedTuple):
    """Where a rank waits for other ranks."""

    name: str  # of the collective
    frame: StackFrame | None  # the user's line that called it

    @property
    def words(self) -> str:
        """Text for messages: `all_reduce at train.py:12`."""
        return self.name if self.frame is None else f"{self.name} at {self.frame.place}"

    @property
    def is_receive(self) -> bool:
        """Does the rank wait for what another one sends to it alone?"""
        return self.name in _RECEIVES


class StuckDataWorker(NamedTuple):
    """The data worker that a rank waits for."""

    number: int
    process: ChildProcess
    frame: StackFrame | None  # the user's line that it is at


class WaitAnalysis(NamedTuple):
    """What two successive observations say about a rank."""

    now: RankObservation
    age_s: float  # how long ago it last made progress
    idle_s: float  # how long it has not used the CPU
    is_busy: bool  # between the two
    peer_wait: PeerWait | None  # None: it does not wait for other ranks
    num_collectives: int = 0  # that it has made


def analyze_wait(
    before: RankObservation,
    now: RankObservation,
    age_s: float,
    idle_s: float,
    *,
    world_size: int,
    num_collectives: int = 0,
) -> WaitAnalysis:
    """Compare two observations of a rank that last made progress `age_s` ago, and used no CPU for `idle_s`."""
    used_s, elapsed_s = now.cpu_s - before.cpu_s, max(now.at - before.at, 1e-3)
    # A phase that ended was no hang, whatever the next one looks like.
    has_moved = before.frames != now.frames or before.heartbeat.since != now.heartbeat.since
    is_busy = has_moved or used_s / elapsed_s > BUSY_SHARE
    peer_wait = find_peer_wait(now, is_busy=is_busy, has_moved=has_moved) if world_size > 1 else None
    return WaitAnalysis(now, age_s, 0.0 if is_busy else idle_s, is_busy, peer_wait, num_collectives)


def find_peer_wait(observed: RankObservation, *, is_busy: bool = False, has_moved: bool = False) -> PeerWait | None:
    """Return where a rank waits for other ranks, or None if it is doing something else.

    Args:
        observed: the rank.
        is_busy: it has used the CPU since the previous observation.
        has_moved: its stack has changed since then.
    """
    if observed.has_ended or not _can_run(observed):
        return None
    frame = user_frame(observed.frames)
    if observed.heartbeat.phase == Phase.EXCHANGING:
        return PeerWait("the gradient exchange", frame)
    if observed.heartbeat.phase == Phase.AWAITING_DESIGNS:
        return PeerWait("the end of the other ranks' designs", frame)
    if observed.heartbeat.phase == Phase.JOINING:
        return PeerWait("joining the job", frame)
    frames = _without_wrappers(observed.frames)
    if not frames:
        return None
    innermost = frames[0]
    is_module_level = innermost.function == "<module>"  # an import, or the script itself
    if not is_module_level and _is_in_collective(innermost):
        return PeerWait(_collective_name(frames), frame)
    if innermost.file.endswith(_SAVER) and any(map(is_save_that_waits, parse_stacks(observed.stacks))):
        return PeerWait("the save of all ranks", frame)
    if is_busy and not has_moved and (late := _late_on_the_gpu(observed)) is not None:
        return PeerWait(f"{late.name} on the GPU", frame)
    if innermost.is_in(_BACKWARD) and not is_busy:  # a backward pass that computes nothing: DDP waits inside it
        return PeerWait("the gradients' all_reduce", frame)
    if _waits_for_a_result(observed.frames[0]):
        return PeerWait("wait() for a collective", frame)
    return None


def _waits_for_a_result(frame: StackFrame) -> bool:
    """Is it a user's line that calls torch's own `wait`? Others, as an event's, have frames of their own further in."""
    return frame.is_users and ".wait(" in linecache.getline(frame.file, frame.line)


def is_save_that_waits(thread: ThreadStack) -> bool:
    """Does this thread write a checkpoint, and wait for the other ranks to do so too?"""
    own = [frame for frame in thread.frames if not frame.is_in_standard_library]
    return bool(own) and own[-1].file.endswith(_SAVER) and _is_in_collective(_without_wrappers(thread.frames)[0])


def is_waiting_for_data(observed: RankObservation) -> bool:
    """Does a rank wait for its data workers, or read a sample itself?"""
    if observed.heartbeat.phase == Phase.DATA:
        return True
    return any(frame.is_in("torch/utils/data/") for frame in observed.frames)


def find_stuck_data_worker(observed: RankObservation) -> StuckDataWorker | None:
    """Return the data worker that a rank waits for: a dead or stopped one, else the one that has read the longest."""
    children = [child for child in observed.children if _is_data_worker(child)]
    workers = [
        StuckDataWorker(
            index if child.data_worker is None else child.data_worker.number, child, user_frame(_own_frames(child))
        )
        for index, child in enumerate(children)
    ]
    for state in "ZTD":
        for worker in workers:
            if worker.process.state is not None and worker.process.state.state == state:
                return worker
    reading = [
        (slot.since, index)
        for index, worker in enumerate(workers)
        if (slot := worker.process.data_worker) is not None and slot.sample is not None
    ]
    if reading:
        _, index = min(reading)
        return workers[index]
    return next((worker for worker in workers if worker.frame is not None), None)


def _can_run(observed: RankObservation) -> bool:
    """Is it not stopped, traced, or blocked uninterruptibly in the kernel?"""
    return observed.state is None or observed.state.state not in "TtD"


def _late_on_the_gpu(observed: RankObservation) -> Collective | None:
    """Return the NCCL collective in which the GPU waits, and with it the host that spins for its result."""
    unfinished = [each for each in observed.collectives if each.backend == "nccl" and not each.is_done]
    return next((each for each in unfinished if time.time() > each.started + _LATE_S), None)


def _is_data_worker(child: ChildProcess) -> bool:
    """Decide by its heartbeat or stack; without a stack, by the name that torch gives to workers."""
    if child.data_worker is not None or child.state is None or child.frames:
        return child.data_worker is not None or any(frame.is_in(*_DATA_LOADING) for frame in child.frames)
    return child.state.name == "pt_data_worker"


def _own_frames(child: ChildProcess) -> Sequence[StackFrame]:
    """Return the frames without those that a fork inherited from its parent."""
    for index, frame in enumerate(child.frames):
        if frame.is_in("multiprocessing/process.py"):
            return child.frames[:index]
    return child.frames


def _without_wrappers(frames: Sequence[StackFrame]) -> Sequence[StackFrame]:
    index = 0
    while index < len(frames) and any(part in frames[index].file for part in _WRAPPERS):
        index += 1
    return frames[index:]


def _is_in_collective(frame: StackFrame) -> bool:
    if frame.is_in(_FILE_ACCESS):
        return False
    return frame.is_in(*_COLLECTIVES) or any(frame.file.endswith(f"/lockstep/{part}") for part in _OWN_COLLECTIVES)


def _collective_name(frames: Sequence[StackFrame]) -> str:
    """Return the name of the function that the caller called: `all_reduce`."""
    name = frames[0].function
    for frame in frames:
        if not _is_in_collective(frame):
            break
        if frame.function != "wrapper":
            name = frame.function
    return name
