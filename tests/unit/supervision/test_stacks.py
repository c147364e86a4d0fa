"""Stacks are asked for and read from outside, also those of a process that holds its interpreter lock."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.supervision.process import blocked_in, children_of, state_of
from lockstep.supervision.stacks import Frame, ask_for_stacks, frames_of, parse_stacks, users_frame
from tests.commands import wait_for

TEXT = """Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 327 in wait

Current thread 0x00007f02 (most recent call first):
  File "a folder/data set.py", line 9 in __getitem__
  File "<frozen runpy>", line 88 in _run_code
  ...
"""

# Deadlocks in a native call, with the interpreter lock in its hand.
DEADLOCK = """
import ctypes, faulthandler, sys
from lockstep.supervision.stacks import ASK_FOR_STACKS
faulthandler.register(ASK_FOR_STACKS, file=open(sys.argv[1], "a"), all_threads=True)
mutex = ctypes.create_string_buffer(64)
lock = ctypes.PyDLL(None).pthread_mutex_lock
lock(mutex)
print("ready", flush=True)
lock(mutex)
"""


@contextmanager
def running(*command: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def lines_of(text: str) -> list[int]:
    """Of the first thread."""
    return [frame.line for thread in parse_stacks(text)[:1] for frame in thread.frames]


def test_threads_and_frames_are_read() -> None:
    threads = parse_stacks(TEXT)
    assert [thread.ident for thread in threads] == [0x7F01, 0x7F02]
    frames = frames_of(threads, 0x7F02)
    assert frames == [Frame("a folder/data set.py", 9, "__getitem__"), Frame("<frozen runpy>", 88, "_run_code")]
    assert frames_of(threads, 3) == []


def test_the_users_frame_is_none_of_a_library() -> None:
    import torch

    users = Frame("train.py", 3, "step")
    frames = [Frame(os.__file__, 1, "f"), Frame(torch.__file__, 1, "g"), Frame("<string>", 1, "h"), users]
    assert users_frame([*frames, Frame("main.py", 1, "main")]) == users
    assert users_frame(frames[:3]) is None


def test_a_process_that_holds_its_interpreter_lock_shows_its_line(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with running(DEADLOCK, str(path)) as process:
        wait_for(lambda: lines_of(ask_for_stacks(process.pid, path, timeout_s=10)) == [9], 10, "the deadlock")
        assert len(parse_stacks(path.read_text())) == 1, "nothing is left of what was asked before"


def test_a_process_that_does_not_expect_it_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "stacks").touch()
    with running("print('ready', flush=True); import time; time.sleep(60)") as process:
        assert ask_for_stacks(process.pid, tmp_path / "stacks", timeout_s=0.1) == ""
        assert process.poll() is None, "the signal would have killed it"


def test_a_stopped_process_does_not_answer_but_its_state_does(tmp_path: Path) -> None:
    (tmp_path / "stacks").touch()
    with running(DEADLOCK, str(tmp_path / "stacks")) as process:
        wait_for(lambda: lines_of(ask_for_stacks(process.pid, tmp_path / "stacks")) == [9], 10, "the deadlock")
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: (state := state_of(process.pid)) is not None and state.is_stopped, 10, "stopped")
        assert ask_for_stacks(process.pid, tmp_path / "stacks", timeout_s=0.1) == ""
        lines = lines_of(ask_for_stacks(process.pid, tmp_path / "stacks", timeout_s=10, wake=True))
        assert lines == [9], "it answers when it may go on"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import os; p = os.open('PIPE', os.O_RDWR); print('ready', flush=True); os.read(p, 1)", "read of PIPE"),
        ("print('ready', flush=True); open('PIPE').read()", "open of PIPE"),
        ("import os; r, w = os.pipe(); print('ready', flush=True); os.read(r, 1)", "read of a pipe"),
        ("import time; print('ready', flush=True); time.sleep(60)", ""),
    ],
)
def test_a_blocked_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with running(text.replace("PIPE", str(tmp_path / "pipe"))) as process:
        wait_for(lambda: (state := state_of(process.pid)) is not None and state.state == "S", 10, "it sleeps")
        wait_for(lambda: blocked_in(process.pid) == words.replace("PIPE", str(tmp_path / "pipe")), 10, words)


def test_children_are_found_and_the_dead_among_them(tmp_path: Path) -> None:
    text = "import os, time\nif os.fork() == 0: os.kill(os.getpid(), 9)\nprint('ready', flush=True); time.sleep(60)"
    with running(text) as process:
        (child,) = children_of(process.pid)
        wait_for(lambda: (state := state_of(child)) is not None and state.is_dead, 10, "it is dead")
        state = state_of(child)
        assert state is not None
        assert state.exit_signal == signal.SIGKILL
    assert state_of(process.pid) is None
    assert children_of(process.pid) == []
