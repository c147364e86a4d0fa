"""Processes of a job are found by their marker, and what they leave behind is found too."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from lockstep.chaos.job_processes import LeftoverCheck, MarkedProcesses, listening_tcp_sockets
from tests.commands import wait_for

SLEEPER = """
import os, signal, socket, sys
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())  # which does not listen
child = os.fork()
if child == 0:
    signal.pause()
print(child, flush=True)
signal.pause()
"""


class Family(NamedTuple):
    marked: MarkedProcesses
    parent: int
    child: int


@pytest.fixture
def family() -> Iterator[Family]:
    marked = MarkedProcesses("LOCKSTEP_TEST_MARK", f"of {os.getpid()}")
    command = [sys.executable, "-c", SLEEPER]
    with subprocess.Popen(command, env={**os.environ, **marked.variables}, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            yield Family(marked, parent.pid, child)
        finally:
            for pid in (child, parent.pid):
                marked.send(pid, signal.SIGKILL)
            parent.kill()


def test_marked_processes_are_found_with_their_children(family: Family) -> None:
    marked, parent, child = family
    assert {(process.pid, process.parent) for process in marked.find()} == {(parent, os.getpid()), (child, parent)}
    assert MarkedProcesses("LOCKSTEP_TEST_MARK", "another").find() == []


def test_a_zombie_does_not_count(family: Family) -> None:
    marked, parent, child = family
    assert marked.send(child, signal.SIGKILL)
    wait_for(lambda: [process.pid for process in marked.find()] == [parent], 10, "the child is dead")
    assert not marked.send(child, signal.SIGKILL)
    assert Path(f"/proc/{child}").exists(), "it is a zombie"


def test_an_unmarked_process_is_not_signalled(family: Family) -> None:
    assert not MarkedProcesses("LOCKSTEP_TEST_MARK", "another").send(family.parent, signal.SIGKILL)
    assert family.marked.is_marked(family.parent)


def test_listening_sockets_are_found_until_they_are_closed(family: Family) -> None:
    marked, parent, child = family
    with socket.create_server(("127.0.0.1", 0)):  # of an unmarked process
        listening = marked.listening_sockets()
    assert len(listening) == 1
    assert listening <= listening_tcp_sockets()
    for pid in (child, parent):
        marked.send(pid, signal.SIGKILL)
    wait_for(lambda: not listening & listening_tcp_sockets(), 10, "they are closed")


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    return folder


def test_nothing_is_reported_where_nothing_is_left(memory: Path) -> None:
    leftovers = LeftoverCheck(MarkedProcesses("LOCKSTEP_TEST_MARK", "of nobody"), memory)
    leftovers.record_sockets()
    leftovers.expect_processes_to_end("was killed", timeout_s=0)
    leftovers.expect_no_shared_memory()
    assert leftovers.check().is_passed


def test_a_process_that_is_left_is_reported_once_and_killed(family: Family, memory: Path) -> None:
    marked, parent, child = family
    leftovers = LeftoverCheck(marked, memory)
    leftovers.expect_processes_to_end("was killed", timeout_s=0.1)
    problems = leftovers.check().problems
    assert len(problems) == 2
    for pid in (parent, child):
        assert any(f"0.1 s after its launcher was killed, process {pid} (" in problem for problem in problems)
    assert not marked.find()
    assert leftovers.check().is_passed


# Its child, which is not marked, continues to listen.
LEAVES_A_LISTENER = """
import socket, subprocess, sys
listener = socket.create_server(("127.0.0.1", 0))
sleeper = [sys.executable, "-c", "import sys; sys.stdin.read()"]
subprocess.Popen(sleeper, env={}, pass_fds=[listener.fileno()])
print("listens", flush=True)
sys.stdin.read(1)
"""


def test_a_port_that_an_unmarked_child_holds_is_reported(memory: Path) -> None:
    marked = MarkedProcesses("LOCKSTEP_TEST_MARK", f"of {os.getpid()}")
    leftovers = LeftoverCheck(marked, memory)
    command, pipe = [sys.executable, "-c", LEAVES_A_LISTENER], subprocess.PIPE
    with subprocess.Popen(command, env={**os.environ, **marked.variables}, stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"listens\n"
        leftovers.record_sockets()
        parent.kill()
        leftovers.expect_processes_to_end("was killed", timeout_s=10)
        assert leftovers.check().problems == ("1 of its sockets still listen",)
    wait_for(lambda: leftovers.check().is_passed, 10, "the child has ended too")


def test_shared_memory_that_is_left_is_reported(memory: Path) -> None:
    leftovers = LeftoverCheck(MarkedProcesses("LOCKSTEP_TEST_MARK", "of nobody"), memory)
    (memory / "lockstep-agent-x").mkdir()
    leftovers.expect_no_shared_memory()
    assert leftovers.check().problems == ("shared memory: lockstep-agent-x",)
