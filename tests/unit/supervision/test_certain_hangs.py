"""Which hangs are certain, so that the job ends at the hang limit, and which may be healthy pauses."""

import os
import time
from pathlib import Path

import pytest

from lockstep.supervision.certain_hangs import find_certain_hang
from lockstep.supervision.flight_recorder import Collective
from lockstep.supervision.heartbeat import DataWorker, Phase
from lockstep.supervision.linux_processes import ProcessState
from lockstep.supervision.rank_probe import ChildProcess, RankObservation
from lockstep.supervision.stack_dumps import StackFrame
from lockstep.supervision.wait_analysis import WaitAnalysis, analyze_wait
from tests.unit.supervision.observations import TORCH, calls, seen

S = 30.0
MAIN = 'Thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 3 in main\n'
HELPER = 'Thread 0x2 (most recent call first):\n  File "/home/me/upload.py", line 9 in run\n'
STDLIB = Path(os.__file__).parent
COPYING = f'Thread 0x2 (most recent call first):\n  File "{STDLIB}/shutil.py", line 9 in copyfileobj\n'
TIMER = (
    f'Thread 0x2 (most recent call first):\n  File "{STDLIB}/threading.py", line 331 in wait\n'
    f'  File "{STDLIB}/threading.py", line 1376 in run\n'
)
IDLE_POOL = (
    f'Thread 0x2 (most recent call first):\n  File "{STDLIB}/concurrent/futures/thread.py", line 81 in _worker\n'
)
FEEDER = (
    f'Thread 0x2 (most recent call first):\n  File "{STDLIB}/threading.py", line 327 in wait\n'
    f'  File "{STDLIB}/multiprocessing/queues.py", line 231 in _feed\n'
)
PINNING = f'Thread 0x2 (most recent call first):\n  File "{TORCH}/utils/data/_utils/pin_memory.py", line 9 in loop\n'


def made(*names: str, done: bool = False, age_s: float = 60.0, backend: str = "gloo", sizes: str = "[[3]]") -> tuple:
    """The collectives that a rank has made, of which the last is not done."""
    last = len(names)
    return tuple(
        Collective(number, "0", name, sizes, done or number < last, backend, time.time() - age_s)
        for number, name in enumerate(names, 1)
    )


def waiting(rank: int, *names: str, **more: object) -> RankObservation:
    """A rank that waits in the last of these collectives."""
    return seen(rank, *calls(names[-1], 9), collectives=made(*names), stacks=MAIN)._replace(**more)


def certain(*ranks: RankObservation, idle_s: float = 40.0, one_machine: bool = True) -> set[int] | None:
    analyzed: list[WaitAnalysis] = [analyze_wait(each, each, 50.0, idle_s, world_size=2) for each in ranks]
    return find_certain_hang(analyzed, S, is_one_machine=one_machine)


AT_WORK = seen(1, StackFrame("/home/me/train.py", 3, "evaluate"), stacks=MAIN)
STOPPED = seen(1, state="T")
EXCHANGING = seen(1, phase=Phase.EXCHANGING, stacks=MAIN)


def test_a_pause_is_never_certain() -> None:
    assert certain(waiting(0, "barrier"), AT_WORK) is None
    assert certain(AT_WORK._replace(rank=0), AT_WORK) is None


def test_a_stopped_rank_is_once_it_was_stopped_for_the_limit() -> None:
    assert certain(waiting(0, "barrier"), STOPPED) == {1}
    assert certain(waiting(0, "barrier"), STOPPED, idle_s=20) is None
    assert certain(waiting(0, "barrier"), seen(1, state="t")) is None, "a debugger traces it"


@pytest.mark.parametrize(
    ("state", "exit_signal", "is_certain"), [("T", 0, True), ("Z", 9, True), ("Z", 0, False), ("S", 0, False)]
)
def test_a_data_worker_that_is_stopped_or_was_killed(state: str, exit_signal: int, is_certain: bool) -> None:
    """One that has exited may have read all of its part of a stream."""
    process = ProcessState(200, "pt_data_worker", state, 0.0, 1, exit_signal)
    worker = ChildProcess(200, process, "", (), "", DataWorker(0, 200, None, 1.0))
    assert certain(seen(1, phase=Phase.DATA, children=(worker,))) == ({1} if is_certain else None)


def test_a_pipe_that_nobody_else_writes_to_unless_another_thread_may() -> None:
    reader = AT_WORK._replace(reads_own_pipe=True)
    assert certain(reader) == {1}
    for harmless in (PINNING, IDLE_POOL, FEEDER, "Thread 0x2 (most recent call first):\n"):
        assert certain(reader._replace(stacks=MAIN + harmless)) == {1}, harmless
    for helper in (HELPER, COPYING, TIMER):
        assert certain(reader._replace(stacks=MAIN + helper)) is None, helper
    assert certain(reader._replace(stacks="")) is None, "it has not answered, so its threads are unknown"


def test_a_rank_that_others_wait_for_has_ended() -> None:
    ended = seen(1, phase=Phase.LEAVING)
    assert certain(waiting(0, "barrier"), ended) == set()
    assert certain(waiting(0, "barrier"), ended, idle_s=20) is None, "either may still be at work"
    assert certain(waiting(0, "barrier", stacks=MAIN + HELPER), ended) is None
    on_gpu = waiting(0, "barrier", collectives=made("barrier", backend="nccl"))
    assert certain(on_gpu, ended) == set()
    assert certain(waiting(0, "barrier"), ended, one_machine=False) is None
    assert certain(seen(0, *calls("wait", 9), stacks=MAIN), ended) is None, "it waits in no collective that is recorded"


def test_different_collectives_under_one_number() -> None:
    reduces = waiting(0, "all_reduce", "all_reduce")
    assert certain(reduces, waiting(1, "all_reduce", "barrier")) == set()
    assert certain(reduces, waiting(1, "all_reduce", "barrier"), one_machine=False) == set()
    larger = waiting(1, "all_reduce", collectives=made("all_reduce", "all_reduce", sizes="[[9]]"))
    assert certain(reduces, larger) == set()
    assert certain(reduces, waiting(1, "all_reduce", "all_reduce")) is None, "the network may be slow"


def test_ranks_that_all_receive() -> None:
    receiving = [seen(rank, *calls("recv", 9), stacks=MAIN) for rank in range(2)]
    assert certain(*receiving) == set()
    assert certain(*receiving, idle_s=20) is None
    assert certain(*receiving, one_machine=False) is None, "another machine's rank may send"
    assert certain(receiving[0], AT_WORK) is None
    assert certain(receiving[0], waiting(1, "barrier")) is None, "the network may be slow"
    assert certain(receiving[0], receiving[1]._replace(stacks=MAIN + HELPER)) is None, "that thread may send"


def test_collectives_that_may_still_meet() -> None:
    root = waiting(0, "scatter", collectives=made("scatter", sizes="[[2, 3]]"))
    assert certain(root, waiting(1, "scatter", collectives=made("scatter", sizes="[]"))) is None
    square, flat = (made("broadcast", sizes=sizes) for sizes in ("[[4, 4]]", "[[16]]"))
    assert certain(waiting(0, "broadcast", collectives=square), waiting(1, "broadcast", collectives=flat)) is None
    recent = waiting(0, "all_reduce", collectives=made("all_reduce", age_s=10.0))
    assert certain(recent, waiting(1, "barrier", collectives=made("barrier", age_s=10.0))) is None
    assert certain(waiting(0, "all_reduce"), waiting(1, "barrier"), AT_WORK._replace(rank=2)) is None


def test_a_rank_waits_for_one_that_waits_elsewhere() -> None:
    ahead = waiting(0, "all_reduce", "barrier")
    behind = EXCHANGING._replace(collectives=made("all_reduce", done=True))
    assert certain(ahead, behind) == set()
    assert certain(ahead, behind, one_machine=False) is None
    assert certain(ahead, behind._replace(stacks=MAIN + HELPER)) is None, "that thread may begin the barrier"
    assert certain(ahead, behind, idle_s=20) is None
    on_gpu = made("all_reduce", done=True, backend="nccl")
    assert certain(ahead, behind._replace(collectives=on_gpu)) is None, "the GPU may be at work"
    assert certain(EXCHANGING._replace(rank=0), EXCHANGING) is None
