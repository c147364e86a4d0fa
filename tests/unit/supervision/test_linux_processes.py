"""What Linux says about processes: state, children, blocking calls, out-of-memory kills."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.supervision.linux_processes import (
    OutOfMemoryKills,
    blocked_in,
    children_of,
    is_only_writer_of_its_pipe,
    process_state,
    waits_for_own_lock,
)
from lockstep.supervision.stack_dumps import _has_handler
from tests.commands import wait_for
from tests.unit.supervision.scripts import running

_PR_SET_NAME = 15


@pytest.fixture
def truncated_name() -> Iterator[None]:
    """Return a process name that ends within a letter: the kernel keeps the first 15 bytes."""
    before = Path("/proc/self/comm").read_bytes().strip()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, "обработка данных".encode())
    yield
    ctypes.CDLL(None).prctl(_PR_SET_NAME, before)


@pytest.mark.usefixtures("truncated_name")
def test_a_process_name_may_end_within_a_letter() -> None:
    state = process_state(os.getpid())
    assert state is not None
    assert state.name.startswith("обработ")
    assert os.getpid() in children_of(os.getppid())
    assert not _has_handler(os.getpid())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import os; p = os.open('PIPE', os.O_RDWR); print('ready', flush=True); os.read(p, 1)", "read of PIPE"),
        ("print('ready', flush=True); open('PIPE').read()", "open of PIPE"),
        ("import os; r, w = os.pipe(); print('ready', flush=True); os.read(r, 1)", "read of a pipe"),
        ("import time; print('ready', flush=True); time.sleep(60)", ""),
    ],
)
def test_a_blocked_file_is_named(tmp_path: Path, script: str, words: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with running(script.replace("PIPE", str(tmp_path / "pipe"))) as process:
        wait_for(lambda: (state := process_state(process.pid)) is not None and state.state == "S", 10, "it sleeps")
        wait_for(lambda: blocked_in(process.pid) == words.replace("PIPE", str(tmp_path / "pipe")), 10, words)


@pytest.mark.parametrize(
    ("before", "is_only_writer"),
    [
        ("", True),
        ("if os.fork() == 0: die_with_parent(parent); time.sleep(60)", False),  # the child has it open for writing
        ("if os.fork() == 0: die_with_parent(parent); os.close(w); time.sleep(60)", True),
        ("os.mkfifo(PATH); r = os.open(PATH, os.O_RDWR)", False),  # anybody may open it by its name
        ("os.set_blocking(w, False); signal.set_wakeup_fd(w)", False),  # a signal writes to it
    ],
)
def test_a_pipe_that_no_other_process_can_write_to(tmp_path: Path, before: str, is_only_writer: bool) -> None:
    opened = before.replace("PATH", repr(str(tmp_path / "pipe")))
    imports = "import os, signal, time\nfrom lockstep.supervision.linux_processes import die_with_parent"
    script = f"{imports}\nparent = os.getpid()\nr, w = os.pipe()\n{opened}\nprint('ready', flush=True)\nos.read(r, 1)"
    with running(script) as process:
        wait_for(lambda: blocked_in(process.pid).startswith("read of"), 10, "it reads")
        wait_for(lambda: is_only_writer_of_its_pipe(process.pid) == is_only_writer, 10, "known")


# Starts a process that reads its standard input, in a namespace where no other process is visible.
UNSEEN_WRITER = """
import subprocess, sys, time
from lockstep.supervision.linux_processes import blocked_in, is_only_writer_of_its_pipe
reader = subprocess.Popen([sys.executable, "-c", "import os; os.read(0, 1)"])
while not blocked_in(reader.pid):
    time.sleep(0.01)
print(is_only_writer_of_its_pipe(reader.pid), flush=True)
reader.kill()
"""


def test_a_writer_that_cannot_be_seen() -> None:
    namespace = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], check=False).returncode != 0:
        pytest.skip("needs namespaces of processes")
    command = [*namespace, sys.executable, "-c", UNSEEN_WRITER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "False\n"


def test_a_process_that_reads_no_pipe() -> None:
    with running("print('ready', flush=True); import time; time.sleep(60)") as process:
        assert not is_only_writer_of_its_pipe(process.pid)
    assert not is_only_writer_of_its_pipe(process.pid)


@pytest.mark.parametrize(
    ("wait", "is_own_lock"),
    [
        ("lock.acquire()", True),
        ("threading.Event().wait()", True),
        ("lock.acquire(timeout=60)", False),
        ("shared.acquire()", False),  # another process may release it
        ("time.sleep(60)", False),
    ],
)
def test_a_wait_for_a_lock_of_the_process_alone(wait: str, is_own_lock: bool) -> None:
    held = "lock, shared = threading.Lock(), multiprocessing.Lock()\nlock.acquire(); shared.acquire()"
    with running(f"import multiprocessing, threading, time\n{held}\nprint('ready', flush=True)\n{wait}") as process:
        wait_for(lambda: (state := process_state(process.pid)) is not None and state.state == "S", 10, "it sleeps")
        wait_for(lambda: waits_for_own_lock(process.pid) == is_own_lock, 10, "known")


def test_children_are_found_including_dead_ones() -> None:
    script = "import os, time\nif os.fork() == 0: os.kill(os.getpid(), 9)\nprint('ready', flush=True); time.sleep(60)"
    with running(script) as process:
        (child,) = children_of(process.pid)
        wait_for(lambda: (state := process_state(child)) is not None and state.is_dead, 10, "it is dead")
        state = process_state(child)
        assert state is not None
        assert state.exit_signal == signal.SIGKILL
    assert process_state(process.pid) is None
    assert children_of(process.pid) == []


def test_an_out_of_memory_kill_is_noticed(tmp_path: Path) -> None:
    counter = tmp_path / "memory.events"
    counter.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 9\n")
    kills = OutOfMemoryKills([tmp_path / "not there", counter])
    assert not kills.any_since()
    counter.write_text("low 0\noom 5\noom_kill 4\noom_group_kill 9\n")
    assert kills.any_since()


def test_without_a_counter_no_kill_is_reported(tmp_path: Path) -> None:
    (tmp_path / "vmstat").write_text("nr_free_pages 1\n")
    assert not OutOfMemoryKills([tmp_path / "vmstat", tmp_path / "none"]).any_since()


def test_this_machine_has_a_counter() -> None:
    kills = OutOfMemoryKills()
    assert kills._path is not None
    assert not kills.any_since()
