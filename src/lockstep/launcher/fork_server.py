"""The fork server: a process that has already imported torch, from which every rank is forked.

The agent starts it as `python -m lockstep.launcher.fork_server SOCKET WARMTH TARGET …`.

[Note: fork server]

Importing torch takes most of the time of a start or a restart. So one process imports it once, does nothing else with
it (no thread, no CUDA), and every rank is a fork of that process. The agent and the server exchange lines of JSON. The
agent asks for a rank, receives its process id, and later a message that the rank has ended; it releases a rank that has
ended; and it may ask the server to import another module that ranks turned out to need.

The server also reaps processes. An ended rank stays a zombie until the agent has released it, so that a signal for it
cannot reach another process with a reused id. Orphans of ranks become children of the server. When the agent is gone
and its socket closes, the server kills all ranks and whatever they have started.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from lockstep.config import environment
from lockstep.launcher import worker_main
from lockstep.supervision.heartbeat import COMPILER
from lockstep.supervision.linux_processes import (
    become_subreaper,
    die_with_parent,
    own_children,
    signal_on_parent_death,
)
from lockstep.supervision.process_title import describe_target, title_fork_server

WARM = "warm"
COLD = "cold"  # each rank is a fresh interpreter, for scripts that must import torch themselves

# The closed socket says the same, but is not read during an import, and the ranks must not keep training meanwhile.
_AGENT_IS_GONE = signal.SIGRTMIN + 8 if sys.platform == "linux" else None

_IGNORED_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
_MAX_RECEIVED_BYTES = 2**16
_END_WITHIN_S = 1.0


def main() -> NoReturn:
    """Serve the agent until it is gone."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    is_warm, target = sys.argv[2] == WARM, sys.argv[3:]
    become_subreaper()
    title_fork_server(describe_target(target))
    # A signal to the whole job reaches this process too, and its end would kill the ranks before they have saved.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _IGNORED_SIGNALS}
    ranks = _ForkedRanks(connection, target, handlers, is_warm=is_warm)
    if _AGENT_IS_GONE is not None:
        signal.signal(_AGENT_IS_GONE, lambda *_: ranks.end())
        signal_on_parent_death(_AGENT_IS_GONE)
        if _is_closed(connection):  # the agent was gone before
            ranks.end()
    if is_warm:
        for module in _modules_for(target):
            importlib.import_module(module)
        gc.freeze()  # all of this stays: collecting it would copy the memory pages that ranks share
    wakeup, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    unread = b""
    while True:
        readable, _, _ = select.select([connection.fileno(), wakeup], [], [])
        if wakeup in readable:
            os.read(wakeup, _MAX_RECEIVED_BYTES)
            ranks.report_ended()
        if connection.fileno() in readable:
            received = connection.recv(_MAX_RECEIVED_BYTES)
            if not received:
                ranks.end()
            *lines, unread = (unread + received).split(b"\n")
            for line in lines:
                ranks.handle(json.loads(line))


class _ForkedRanks:
    """The ranks that were forked from this process."""

    def __init__(
        self, connection: socket.socket, target: Sequence[str], handlers: Mapping[signal.Signals, Any], *, is_warm: bool
    ) -> None:
        """`handlers` are the signal handlers that a rank starts with."""
        self._connection = connection
        self._target = list(target)
        self._handlers = handlers
        self._is_warm = is_warm
        self._running: set[int] = set()
        self._ended: set[int] = set()  # zombies until the agent releases them

    def handle(self, request: dict[str, Any]) -> None:
        """Handle a request of the agent."""
        if request["kind"] == "start":
            pid = self._fork(request["environment"])
            self._running.add(pid)
            _send(self._connection, {"kind": "started", "pid": pid})
            self.report_ended()  # it may have ended already
        elif request["kind"] == "release":
            self._release(request["pid"])
        elif self._is_warm:
            with suppress(Exception):  # a rank that needs the module will raise the same error, and report it
                importlib.import_module(request["module"])
            gc.freeze()

    def report_ended(self) -> None:
        """Tell the agent which ranks have ended since the last time."""
        for pid in list(self._running):
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                self._running.remove(pid)
                self._ended.add(pid)
                has_exited = found.si_code == os.CLD_EXITED
                exit_code = found.si_status if has_exited else -found.si_status
                _send(self._connection, {"kind": "ended", "pid": pid, "exit_code": exit_code})
        self._reap_orphans()

    def end(self) -> NoReturn:
        """Kill everything and exit: the agent is gone. A rank that is just being forked dies with this process."""
        for pid in self._running | self._ended:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        deadline = time.monotonic() + _END_WITHIN_S  # do not wait for a process that the kernel holds up
        while time.monotonic() < deadline and (left := own_children()):
            for pid in left:
                _kill(pid)  # a process that left its rank's process group became our child when the rank died
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
        os._exit(0)

    def _fork(self, variables: dict[str, str]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_rank(parent, variables)
            except Exception:  # nothing else would print it
                traceback.print_exc()
            finally:
                os._exit(1)
        return pid

    def _become_rank(self, parent: int, variables: dict[str, str]) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if _AGENT_IS_GONE is not None:
            signal.signal(_AGENT_IS_GONE, signal.SIG_DFL)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        die_with_parent(parent)
        self._connection.close()
        environment.replace_variables(variables)
        if not self._is_warm:
            os.execv(sys.executable, [sys.executable, "-m", "lockstep.launcher.worker_main", *self._target])
        _reseed_numpy()
        worker_main.main(self._target)

    def _release(self, pid: int) -> None:
        if pid in self._ended:
            os.waitpid(pid, 0)
            self._ended.remove(pid)
        if not self._running | self._ended:  # the attempt is over, also for processes that left their ranks' groups
            for orphan in own_children():
                _kill(orphan)

    def _reap_orphans(self) -> None:
        """Reap orphans of ranks, which became our children, but not the ranks themselves."""
        ranks = self._running | self._ended
        for pid in own_children():
            if pid not in ranks:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _modules_for(target: Sequence[str]) -> list[str]:
    """Return the modules that a target is sure to import: torch, and more if it is or mentions lockstep."""
    modules = ["torch", "torch.distributed", "torch.utils.data"]
    if list(target[:2]) == ["-m", "lockstep"]:
        return [*modules, "lockstep.cli", "lockstep.train.train_job"]
    with suppress(OSError):
        script = Path(target[0]).read_bytes()
        modules += ["lockstep.train.trainer"] if b"lockstep" in script else []
        modules += [COMPILER] if b"DistributedDataParallel" in script else []  # DDP's constructor imports it
    return modules


def _reseed_numpy() -> None:
    """Reseed numpy's global generator, which was seeded on import: all ranks would draw the same numbers from it."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _is_closed(connection: socket.socket) -> bool:
    with suppress(BlockingIOError):
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the agent is gone: the closed socket will say so next
        connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
