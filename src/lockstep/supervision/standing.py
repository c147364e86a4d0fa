"""What a rank is doing, judged from one observation: does it wait for other ranks, for data, or work by itself?"""

import linecache
import time
from collections.abc import Sequence
from typing import NamedTuple

from lockstep.supervision.collectives import Collective
from lockstep.supervision.examination import Child, Observation
from lockstep.supervision.pulse import Phase
from lockstep.supervision.stacks import Frame, users_frame

# Frames that only stand between a caller and what it waits for.
_GO_BETWEEN = ("torch/_ops.py", "torch/utils/_contextlib.py", "/threading.py", "/contextlib.py", "/concurrent/futures/")
_MEETING = ("torch/distributed/", "torch/nn/parallel/distributed.py")
_OUR_MEETING = ("engine/channel.py", "world/collectives.py", "world/objects.py", "world/setup.py", "launcher/store.py")
_BACKWARD = "torch/autograd/graph.py"
_BUSY_SHARE = 0.1  # of one processor
_LATE_S = 1.0  # a collective takes less, on a GPU that is not kept waiting
_LOADING = ("torch/utils/data/", "/multiprocessing/")


class Meeting(NamedTuple):
    """Where a rank waits for others."""

    name: str
    frame: Frame | None  # the user's line that led there

    @property
    def words(self) -> str:
        return self.name if self.frame is None else f"{self.name} at {self.frame.place}"


class StuckWorker(NamedTuple):
    number: int
    child: Child
    frame: Frame | None


class Judged(NamedTuple):
    """What two observations of a rank, one after the other, say about it."""

    now: Observation
    age_s: float  # in this phase
    is_busy: bool
    meeting: Meeting | None  # where it waits for other ranks


def judge(before: Observation, now: Observation, age_s: float, *, world_size: int) -> Judged:
    used_s, past_s = now.cpu_s - before.cpu_s, max(now.at - before.at, 1e-3)
    # A phase that is over was no hang, however the next one looks.
    has_moved = before.frames != now.frames or before.reading.since != now.reading.since
    is_busy = has_moved or used_s / past_s > _BUSY_SHARE
    met = meeting(now, is_busy=is_busy, has_moved=has_moved) if world_size > 1 else None
    return Judged(now, age_s, is_busy, met)


def meeting(observed: Observation, *, is_busy: bool = False, has_moved: bool = False) -> Meeting | None:
    """Where it waits for other ranks; None, if it does something else.

    `is_busy`: it has used the processor of late; `has_moved`: its stack is another than a while ago.
    """
    if observed.has_ended or not can_run(observed):
        return None
    frame = users_frame(observed.frames)
    if observed.reading.phase == Phase.EXCHANGING:
        return Meeting("the gradient exchange", frame)
    if observed.reading.phase == Phase.AWAITING_DESIGNS:
        return Meeting("the end of the other ranks' designs", frame)
    if observed.reading.phase == Phase.JOINING:
        return Meeting("joining the job", frame)
    inner = _without_go_betweens(observed.frames)
    if not inner:
        return None
    is_imported = inner[0].function == "<module>"  # or it is the script itself
    if not is_imported and (inner[0].is_in(*_MEETING) or _is_ours(inner[0])):
        return Meeting(_name(inner), frame)
    if is_busy and not has_moved and (late := _late_on_the_gpu(observed)) is not None:
        return Meeting(f"{late.name} on the GPU", frame)
    if inner[0].is_in(_BACKWARD) and not is_busy:  # on its own it would compute: DistributedDataParallel waits in it
        return Meeting("the gradients' all_reduce", frame)
    if inner[0].is_users and ".wait(" in linecache.getline(inner[0].file, inner[0].line):
        return Meeting("wait() for a collective", frame)
    return None


def _late_on_the_gpu(observed: Observation) -> Collective | None:
    """A host that waits for the GPU turns in a circle, at whatever line asks for a result; the GPU waits for others."""
    unfinished = [each for each in observed.collectives if each.backend == "nccl" and not each.is_done]
    return next((each for each in unfinished if time.time() > each.started + _LATE_S), None)


def can_run(observed: Observation) -> bool:
    """Not stopped, nor blocked in the kernel so that it hears nothing."""
    return observed.state is None or observed.state.state not in "TtD"


def waits_for_data(observed: Observation) -> bool:
    """For its data workers, or inside the reading of a sample."""
    if observed.reading.phase == Phase.DATA:
        return True
    return any(frame.is_in("torch/utils/data/") for frame in observed.frames)


def stuck_worker(observed: Observation) -> StuckWorker | None:
    """The data worker for which a rank waits, if one can be told: dead, stopped, or at work for the longest time."""
    own_name = "" if observed.state is None else observed.state.name
    workers = [child for child in observed.children if _is_worker(child, own_name)]
    numbered = [
        StuckWorker(index if child.pulse is None else child.pulse.number, child, users_frame(_own_frames(child)))
        for index, child in enumerate(workers)
    ]
    for state in "ZTD":
        for worker in numbered:
            if worker.child.state is not None and worker.child.state.state == state:
                return worker
    reading = [
        worker for worker in numbered if worker.child.pulse is not None and worker.child.pulse.sample is not None
    ]
    if reading:
        return min(reading, key=lambda worker: worker.child.pulse.since if worker.child.pulse else 0.0)
    return next((worker for worker in numbered if worker.frame is not None), None)


def _is_worker(child: Child, ranks_name: str) -> bool:
    """Of a loader; one that cannot show its stack is told by its name, which is torch's or that of the rank."""
    if child.pulse is not None or child.state is None or child.frames:
        return child.pulse is not None or any(frame.is_in(*_LOADING) for frame in child.frames)
    return child.state.name in ("pt_data_worker", ranks_name)


def _own_frames(child: Child) -> Sequence[Frame]:
    """Less those that it has from the process it is a fork of."""
    for index, frame in enumerate(child.frames):
        if frame.is_in("multiprocessing/process.py"):
            return child.frames[:index]
    return child.frames


def _without_go_betweens(frames: Sequence[Frame]) -> Sequence[Frame]:
    index = 0
    while index < len(frames) and any(part in frames[index].file for part in _GO_BETWEEN):
        index += 1
    return frames[index:]


def _is_ours(frame: Frame) -> bool:
    return any(frame.file.endswith(f"/lockstep/{part}") for part in _OUR_MEETING)


def _name(frames: Sequence[Frame]) -> str:
    """What the caller has called: `all_reduce`."""
    name = frames[0].function
    for frame in frames:
        if not (frame.is_in(*_MEETING) or _is_ours(frame)):
            break
        if frame.function != "wrapper":
            name = frame.function
    return name
