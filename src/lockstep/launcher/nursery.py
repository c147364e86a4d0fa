"""The process that ranks are forked from: `python -m lockstep.launcher.nursery SOCKET WARMTH TARGET …`. [Note: nursery]

Importing torch takes most of the time that a start or a restart takes. So one process of the job imports it, once, does
nothing with it (no thread, no CUDA), and every rank is a fork of it that has torch already. The agent speaks to it in
lines of JSON: it asks for a rank, is told its process id, and when it has ended; it lets go of one that has ended; and
it may ask for another module to be imported, where ranks turned out to need it, so that the next need not.

It also buries the dead. An ended rank stays a zombie until the agent has let go of it, so that a signal meant for it
never reaches a stranger with its number. When the agent is gone, so that its socket closes, all ranks are killed with
whatever they have started.
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
from lockstep.launcher import worker
from lockstep.launcher.kinship import adopt_orphans, be_told_of_parents_end, children, die_with_parent
from lockstep.supervision.pulse import COMPILER

WARM = "warm"
COLD = "cold"  # a rank is a fresh interpreter, for scripts that must see torch imported by themselves

# Its socket tells the same, but is not read during an import, and ranks must not train on meanwhile.
_AGENT_IS_GONE = signal.SIGRTMIN + 8 if sys.platform == "linux" else None

_NOT_FOR_US = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
_MOST_AT_ONCE = 2**16


def main() -> NoReturn:
    connection = socket.socket(fileno=int(sys.argv[1]))
    is_warm, target = sys.argv[2] == WARM, sys.argv[3:]
    adopt_orphans()
    # Somebody who ends a whole job signals us too, and our end would be the ranks' before they are saved.
    usual = {number: signal.signal(number, signal.SIG_IGN) for number in _NOT_FOR_US}
    ranks = _Ranks(connection, target, usual, is_warm=is_warm)
    if _AGENT_IS_GONE is not None:
        signal.signal(_AGENT_IS_GONE, lambda *_: ranks.end())
        be_told_of_parents_end(_AGENT_IS_GONE)
    if is_warm:
        for module in _needed_by(target):
            importlib.import_module(module)
        gc.freeze()  # what is here now is never garbage: collecting it would copy the pages that ranks share
    wakeup, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    unread = b""
    while True:
        readable, _, _ = select.select([connection.fileno(), wakeup], [], [])
        if wakeup in readable:
            os.read(wakeup, _MOST_AT_ONCE)
            ranks.tell_of_the_dead()
        if connection.fileno() in readable:
            received = connection.recv(_MOST_AT_ONCE)
            if not received:
                ranks.end()
            *lines, unread = (unread + received).split(b"\n")
            for line in lines:
                ranks.obey(json.loads(line))


class _Ranks:
    def __init__(
        self, connection: socket.socket, target: Sequence[str], handlers: Mapping[signal.Signals, Any], *, is_warm: bool
    ) -> None:
        """`handlers`: that a rank starts with, by signal."""
        self._connection = connection
        self._target = list(target)
        self._handlers = handlers
        self._is_warm = is_warm
        self._running: set[int] = set()
        self._ended: set[int] = set()  # zombies still

    def obey(self, request: dict[str, Any]) -> None:
        if request["kind"] == "start":
            pid = self._start(request["environment"])
            self._running.add(pid)
            _say(self._connection, {"kind": "started", "pid": pid})
            self.tell_of_the_dead()  # it may be one already
        elif request["kind"] == "let go":
            self._let_go(request["pid"])
        elif self._is_warm:
            with suppress(Exception):  # then a rank that needs it will say what is wrong with it
                importlib.import_module(request["module"])
            gc.freeze()

    def tell_of_the_dead(self) -> None:
        for pid in list(self._running):
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is not None:
                self._running.remove(pid)
                self._ended.add(pid)
                by_itself = found.si_code == os.CLD_EXITED
                code = found.si_status if by_itself else -found.si_status
                _say(self._connection, {"kind": "ended", "pid": pid, "exit_code": code})
        self._bury_orphans()

    def end(self) -> NoReturn:
        """Nobody is left to start ranks for. One that is just being forked dies with us."""
        for pid in self._running | self._ended:
            _kill_group(pid)
        deadline = time.monotonic() + 1.0  # one that the kernel holds up is left to it
        while time.monotonic() < deadline and (left := children()):
            for pid in left:
                _kill(pid)  # what has left its rank's group came to us when the rank died
            with suppress(ChildProcessError):
                os.waitpid(-1, os.WNOHANG)
        os._exit(0)

    def _start(self, variables: dict[str, str]) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                self._become_a_rank(parent, variables)
            except Exception:  # nobody else would say it
                traceback.print_exc()
            finally:
                os._exit(1)
        return pid

    def _become_a_rank(self, parent: int, variables: dict[str, str]) -> None:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if _AGENT_IS_GONE is not None:
            signal.signal(_AGENT_IS_GONE, signal.SIG_DFL)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        die_with_parent(parent)
        self._connection.close()
        environment.replace(variables)
        if not self._is_warm:
            os.execv(sys.executable, [sys.executable, "-m", "lockstep.launcher.worker", *self._target])
        _draw_afresh()
        worker.main(self._target)

    def _let_go(self, pid: int) -> None:
        if pid in self._ended:
            os.waitpid(pid, 0)
            self._ended.remove(pid)
        if not self._running | self._ended:  # an attempt is over, also for what has left its ranks' groups
            for orphan in children():
                _kill(orphan)

    def _bury_orphans(self) -> None:
        """What a rank has left came to us: [Note: nursery]. Ranks themselves are not touched."""
        ours = self._running | self._ended
        for pid in children():
            if pid not in ours:
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)


def _needed_by(target: Sequence[str]) -> list[str]:
    """What a target will surely import: torch, and more where it is lockstep's own trainer or speaks of lockstep."""
    needed = ["torch", "torch.distributed", "torch.utils.data"]
    if list(target[:2]) == ["-m", "lockstep"]:
        return [*needed, "lockstep.cli", "lockstep.train.job"]
    with suppress(OSError):
        script = Path(target[0]).read_bytes()
        needed += ["lockstep.train.trainer"] if b"lockstep" in script else []
        needed += [COMPILER] if b"DistributedDataParallel" in script else []  # which imports it when it is made
    return needed


def _draw_afresh() -> None:
    """numpy's global stream was seeded when it was imported; ranks that drew the same from it would surprise."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _say(connection: socket.socket, message: dict[str, Any]) -> None:
    with suppress(OSError):  # the agent is gone: we shall hear of that next
        connection.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
