"""Deadlocks between the threads of a process are recognized from outside; waits that may end are none."""

import time
from pathlib import Path

import pytest

from lockstep.supervision.linux_processes import waits_for_own_lock
from lockstep.supervision.rank_probe import RankObservation
from lockstep.supervision.stack_dumps import StackFrame, parse_stacks, request_stacks
from lockstep.supervision.thread_waits import can_be_helped, find_deadlock
from tests.commands import wait_for
from tests.unit.supervision.observations import seen
from tests.unit.supervision.scripts import running

# Its threads are daemons, so that it ends when it is killed.
BEGIN = """
import faulthandler, multiprocessing, queue, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from lockstep.supervision.stack_dumps import STACKS_SIGNAL
faulthandler.register(STACKS_SIGNAL, file=open(sys.argv[1], "a"), all_threads=True)
one, other, condition, shared = threading.Lock(), threading.Lock(), threading.Condition(), multiprocessing.Lock()
held = threading.Event()

def take(first, second):
    with first:
        held.set()
        with second:
            pass

def hold_and(wait):
    with other:
        held.set()
        wait()

def take_shared():
    with other:
        held.set()
        shared.acquire()

def start(function, *args):
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread

def main():
"""
DEADLOCKS = {
    "one lock, twice": ("one.acquire()", "one.acquire()"),
    "two locks, in another order": ("one.acquire(); start(take, other, one); held.wait()", "with other: pass"),
    "a condition": ("one.acquire(); start(take, condition, one); held.wait()", "with condition: pass"),
    "the end of a thread": ("one.acquire(); thread = start(take, other, one); held.wait()", "thread.join()"),
    "a queue": ("one.acquire(); start(take, other, one); held.wait()", "queue.Queue().get()"),
    "beside an idle pool": (
        "one.acquire(); pool = ThreadPoolExecutor(2); pool.submit(print, file=sys.stderr).result()",
        "with one: pass",
    ),
    "beside a progress bar": ("import tqdm; bar = tqdm.tqdm(range(9)); one.acquire()", "one.acquire()"),
    "beside TensorBoard": (
        "from tensorboard.summary.writer.event_file_writer import EventFileWriter\n"
        "    writer = EventFileWriter(sys.argv[1] + '-events'); one.acquire()",
        "one.acquire()",
    ),
}
PAUSES = {
    "a deadline": ("one.acquire()", "one.acquire(timeout=60)"),
    "a thread at work": ("start(hold_and, lambda: time.sleep(60)); held.wait()", "with other: pass"),
    "a thread with a deadline": (
        "start(hold_and, lambda: threading.Event().wait(60)); held.wait()",
        "other.acquire()",
    ),
    "no lock": ("pass", "threading.Event().wait()"),
    "a lock of several processes": ("shared.acquire()", "shared.acquire()"),
    "a thread that waits for such a lock": (
        "shared.acquire(); start(take_shared); held.wait(); time.sleep(0.2)",
        "other.acquire()",
    ),
}


@pytest.mark.parametrize("name", DEADLOCKS)
def test_a_deadlock_is_found(name: str, tmp_path: Path) -> None:
    before, wait = DEADLOCKS[name]
    script = write(tmp_path, before, wait)
    with running(RUN, str(tmp_path / "stacks"), str(script)) as process:
        wait_for(lambda: waits_for_own_lock(process.pid), 30, "the wait")  # before stacks are asked for
        wait_for(lambda: bool(find_deadlock(observe(process.pid, tmp_path))), 30, "the deadlock")


@pytest.mark.parametrize("name", PAUSES)
def test_a_wait_that_may_end_is_none(name: str, tmp_path: Path) -> None:
    before, wait = PAUSES[name]
    script = write(tmp_path, before, wait)
    last = len(script.read_text().splitlines()) - 1
    with running(RUN, str(tmp_path / "stacks"), str(script)) as process:
        wait_for(lambda: StackFrame(str(script), last, "main") in observe(process.pid, tmp_path).frames, 30, "the wait")
        time.sleep(0.1)
        observed = observe(process.pid, tmp_path)
    assert observed.stacks
    assert find_deadlock(observed) == []


TRACKER = """
import time

def upload(lock, held):
    with lock:
        held.set()
        time.sleep(60)
"""


def test_a_tracker_may_release_a_lock_though_it_begins_no_collective(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "wandb"
    package.mkdir(parents=True)
    (package / "uploads.py").write_text(TRACKER)
    begin = f"sys.path.insert(0, {str(package)!r}); import uploads; start(uploads.upload, one, held); held.wait()"
    script = write(tmp_path, begin, "one.acquire()")
    with running(RUN, str(tmp_path / "stacks"), str(script)) as process:
        wait_for(lambda: waits_for_own_lock(process.pid), 30, "the wait")
        observed = observe(process.pid, tmp_path)
    assert find_deadlock(observed) == []
    assert not can_be_helped(observed)


def test_without_stacks_nothing_is_known() -> None:
    assert find_deadlock(seen(0, waits_for_own_lock=True)) == []


RUN = "import runpy, sys; runpy.run_path(sys.argv[2])"


def write(folder: Path, before: str, wait: str) -> Path:
    path = folder / "script.py"
    path.write_text(f"{BEGIN}    {before}\n    print('ready', flush=True)\n    {wait}\nmain()\n")
    return path


def observe(pid: int, folder: Path) -> RankObservation:
    stacks = request_stacks(pid, folder / "stacks")
    main = next((thread for thread in parse_stacks(stacks) if any(f.function == "main" for f in thread.frames)), None)
    rank = seen(0, *(main.frames if main else ()), stacks=stacks, waits_for_own_lock=waits_for_own_lock(pid))
    return rank._replace(heartbeat=rank.heartbeat._replace(main_thread=main.ident if main else 0))
