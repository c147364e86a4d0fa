"""Which ranks wait for other ranks, judged by their stacks and phases."""

import os
import threading
import time
from pathlib import Path

import lockstep
from lockstep.checkpoint import async_saver
from lockstep.launcher import tcp_store
from lockstep.supervision import thread_waits, wait_analysis
from lockstep.supervision.flight_recorder import Collective
from lockstep.supervision.heartbeat import Phase
from lockstep.supervision.stack_dumps import StackFrame
from lockstep.supervision.wait_analysis import PeerWait, analyze_wait, find_peer_wait
from tests.unit.supervision.observations import C10D, TORCH, seen


def test_an_import_of_a_collective_module_is_no_wait() -> None:
    assert find_peer_wait(seen(0, StackFrame(C10D, 1, "<module>"))) is None
    assert find_peer_wait(seen(0, StackFrame(C10D, 1, "barrier"))) is not None
    assert find_peer_wait(seen(0, StackFrame(tcp_store.__file__, 1, "wait_for_keys"))) is not None


def test_a_backward_pass_waits_only_if_it_computes_nothing() -> None:
    observed = seen(
        0, StackFrame(f"{TORCH}/autograd/graph.py", 1, "_engine_run_backward"), StackFrame("train.py", 3, "main")
    )
    assert find_peer_wait(observed) is not None
    assert find_peer_wait(observed, is_busy=True) is None


def test_a_stopped_rank_does_not_wait_for_others() -> None:
    assert find_peer_wait(seen(0, phase=Phase.EXCHANGING)) is not None
    assert find_peer_wait(seen(0, phase=Phase.EXCHANGING, state="T")) is None


def test_a_host_that_waits_for_a_late_gpu_waits_for_others() -> None:
    late = Collective(4, "0", "all_reduce", "[[3]]", False, "nccl", time.time() - 60)
    spinning = seen(0, StackFrame("train.py", 12, "main"), collectives=(late,))
    assert find_peer_wait(spinning, is_busy=True) == ("all_reduce on the GPU", StackFrame("train.py", 12, "main"))
    assert find_peer_wait(spinning, is_busy=True, has_moved=True) is None
    script = seen(0, StackFrame("train.py", 12, "<module>"), collectives=(late,))
    assert find_peer_wait(script, is_busy=True) == ("all_reduce on the GPU", StackFrame("train.py", 12, "<module>"))
    assert find_peer_wait(spinning) is None, "an idle rank is stuck at its own line"
    done = seen(0, StackFrame("train.py", 12, "main"), collectives=(late._replace(is_done=True),))
    assert find_peer_wait(done, is_busy=True) is None


def test_a_single_rank_does_not_wait_for_others() -> None:
    alone = seen(0, phase=Phase.EXCHANGING)
    assert analyze_wait(alone, alone, 1.0, 1.0, world_size=1).peer_wait is None
    assert analyze_wait(alone, alone, 1.0, 1.0, world_size=2).peer_wait is not None


def test_a_rank_that_waits_for_a_save_waits_for_others_only_while_the_save_does() -> None:
    """A save that writes to a slow disk is the rank's own work."""
    main = [StackFrame(threading.__file__, 1, "wait"), StackFrame(async_saver.__file__, 1, "wait")]
    frames = (*main, StackFrame("train.py", 3, "main"))
    for innermost, is_waiting in {C10D: True, os.__file__: False, async_saver.__file__: False}.items():
        save = f'  File "{innermost}", line 1 in f\n  File "{async_saver.__file__}", line 2 in work\n'
        observed = seen(0, *frames, stacks=f"Thread 0x2 (most recent call first):\n{save}")
        expected = PeerWait("the save of all ranks", frames[-1]) if is_waiting else None
        assert find_peer_wait(observed) == expected


def test_a_wait_for_an_event_of_the_rank_s_own_threads_is_no_wait_for_others(tmp_path: Path) -> None:
    """Both lines of the script look the same; Python's own `wait` has a frame."""
    script = tmp_path / "train.py"
    script.write_text("work.wait()\ndone.wait()\n")
    work, done = (StackFrame(str(script), line, "main") for line in (1, 2))
    assert find_peer_wait(seen(0, work)) == PeerWait("wait() for a collective", work)
    assert find_peer_wait(seen(0, StackFrame(threading.__file__, 629, "wait"), done)) is None


def test_the_files_of_lockstep_that_wait_for_other_ranks_exist() -> None:
    """They are recognized by their paths, which a rename must not break."""
    package = Path(lockstep.__file__).parent
    assert [path for path in wait_analysis._OWN_COLLECTIVES if not (package / path).is_file()] == []
    assert async_saver.__file__.endswith(wait_analysis._SAVER)
    known = (thread_waits._LISTENER, *thread_waits._WITHOUT_COLLECTIVES)
    threads = [path for path in known if path.startswith("/lockstep/")]
    assert [path for path in threads if not (package.parent / path[1:]).is_file()] == []
