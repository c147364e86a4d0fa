"""Stacks are requested and read from outside, also those of a process that holds its interpreter lock."""

import os
import signal
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from lockstep.supervision.linux_processes import process_state
from lockstep.supervision.stack_dumps import (
    StackFrame,
    _torch_folder,
    frames_of,
    parse_stacks,
    request_stacks,
    user_frame,
)
from tests.commands import wait_for
from tests.unit.supervision.scripts import running

TEXT = """Thread 0x00007f01 (most recent call first):
  File "/lib/threading.py", line 327 in wait

Current thread 0x00007f02 (most recent call first):
  File "a folder/data set.py", line 9 in __getitem__
  File "<frozen runpy>", line 88 in _run_code
  ...
"""

# Deadlocks in a native call that holds the interpreter lock.
DEADLOCK = """
import ctypes, faulthandler, sys
from lockstep.supervision.stack_dumps import STACKS_SIGNAL
faulthandler.register(STACKS_SIGNAL, file=open(sys.argv[1], "a"), all_threads=True)
mutex = ctypes.create_string_buffer(64)
lock = ctypes.PyDLL(None).pthread_mutex_lock
lock(mutex)
print("ready", flush=True)
lock(mutex)
"""


def lines_of(text: str) -> list[int]:
    """Return the line numbers of the first thread."""
    return [frame.line for thread in parse_stacks(text)[:1] for frame in thread.frames]


def test_threads_and_frames_are_parsed() -> None:
    threads = parse_stacks(TEXT)
    assert [thread.ident for thread in threads] == [0x7F01, 0x7F02]
    frames = frames_of(threads, 0x7F02)
    assert frames == [
        StackFrame("a folder/data set.py", 9, "__getitem__"),
        StackFrame("<frozen runpy>", 88, "_run_code"),
    ]
    assert frames_of(threads, 3) == []


def test_the_user_frame_is_not_in_a_library() -> None:
    import torch

    users = StackFrame("train.py", 3, "step")
    frames = [
        StackFrame(os.__file__, 1, "f"),
        StackFrame(torch.__file__, 1, "g"),
        StackFrame("<string>", 1, "h"),
        users,
    ]
    assert user_frame([*frames, StackFrame("main.py", 1, "main")]) == users
    assert user_frame(frames[:3]) is None


def test_torch_is_a_library_wherever_it_is_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also from a source tree, or from the site-packages of another Python."""
    users = StackFrame(f"{tmp_path}/train.py", 3, "step")
    for folder in (f"{tmp_path}/src/torch", "/usr/lib/python3/dist-packages/torch", "/opt/x/lib/site-packages/torch"):
        _torch_folder.cache_clear()
        monkeypatch.setattr(
            "importlib.util.find_spec",
            lambda name, origin=f"{folder}/__init__.py": ModuleSpec(name, None, origin=origin),
        )
        inside = StackFrame(f"{folder}/distributed/distributed_c10d.py", 1, "barrier")
        assert user_frame([inside, users]) == users
        assert inside.is_in("torch/distributed/")
        assert not StackFrame(f"{tmp_path}/torch/distributed/train.py", 1, "f").is_in("torch/distributed/")
    _torch_folder.cache_clear()


def test_a_process_that_holds_its_interpreter_lock_shows_its_line(tmp_path: Path) -> None:
    path = tmp_path / "stacks"
    with running(DEADLOCK, str(path)) as process:
        wait_for(lambda: lines_of(request_stacks(process.pid, path, timeout_s=10)) == [9], 10, "the deadlock")
        assert len(parse_stacks(path.read_text())) == 1, "earlier dumps are removed"


def test_a_process_without_a_handler_is_not_signalled(tmp_path: Path) -> None:
    (tmp_path / "stacks").touch()
    with running("print('ready', flush=True); import time; time.sleep(60)") as process:
        assert request_stacks(process.pid, tmp_path / "stacks", timeout_s=0.1) == ""
        assert process.poll() is None, "the signal would have killed it"


def test_a_stopped_process_dumps_its_stacks_only_when_woken(tmp_path: Path) -> None:
    (tmp_path / "stacks").touch()
    with running(DEADLOCK, str(tmp_path / "stacks")) as process:
        wait_for(lambda: lines_of(request_stacks(process.pid, tmp_path / "stacks")) == [9], 10, "the deadlock")
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: (state := process_state(process.pid)) is not None and state.is_stopped, 10, "stopped")
        assert request_stacks(process.pid, tmp_path / "stacks", timeout_s=0.1) == ""
        lines = lines_of(request_stacks(process.pid, tmp_path / "stacks", timeout_s=10, wake=True))
        assert lines == [9], "it dumps them when it may continue"
