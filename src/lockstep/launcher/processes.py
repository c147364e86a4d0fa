"""The processes of a machine's ranks, as their agent has them: started, asked, looked at and ended."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from lockstep.config import environment
from lockstep.errors import LockstepError
from lockstep.launcher.nursery import COLD, WARM
from lockstep.supervision.process import state_of

_MOST_AT_ONCE = 2**16
_PAUSE_S = 0.02
_FAREWELL_S = 0.5


class RankProcess:
    """One rank's process; it leads a group of its own, with whatever it has started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None  # negative: the signal that ended it

    @property
    def is_running(self) -> bool:
        return self.exit_code is None

    def send(self, number: signal.Signals) -> None:
        """To the rank alone: what it has started, data workers say, is the rank's to end."""
        if self.is_running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """The rank, if it still runs, and all that it has started. Its number is its own until it is let go of."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class NurseryLost(Exception):
    """The nursery has ended, and with it all ranks."""


class StartFailed(LockstepError):
    """This machine does not let us start ranks."""


class Processes:
    """All ranks of this machine, in the order of their local ranks; forks of one nursery. [Note: nursery]"""

    def __init__(self, target: Sequence[str], *, is_warm: bool) -> None:
        self._target = list(target)
        self._warmth = WARM if is_warm else COLD
        self._nursery: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._imported_ahead: list[str] = []
        self._unread = b""
        self._started: list[int] = []  # process ids, as the nursery told them
        self._ended: dict[int, int] = {}  # exit codes by process id; of ranks that have not been let go of
        self.ranks: list[RankProcess] = []

    def prepare(self) -> None:
        """Begin to make ready for a start, without waiting: imports take a second or two."""
        if self._nursery is not None and self._nursery.poll() is None:
            return
        self._close_nursery()
        ours, theirs = socket.socketpair()
        self._nursery = subprocess.Popen(
            [sys.executable, "-m", "lockstep.launcher.nursery", str(theirs.fileno()), self._warmth, *self._target],
            # When torch is imported is when its threads are counted.
            env=environment.snapshot() | {"OMP_NUM_THREADS": str(environment.threads_per_process())},
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # signals from the terminal are the agent's
        )
        theirs.close()
        self._connection = ours
        for module in self._imported_ahead:
            self._say({"kind": "import", "module": module})

    def start(self, variables: Sequence[Mapping[str, str]]) -> list[RankProcess]:
        """A process for each rank, with the given variables besides our own; those before must have ended."""
        for attempt in (1, 2):
            try:
                self.prepare()
                ranks = []
                for each in variables:
                    self._say({"kind": "start", "environment": environment.snapshot() | dict(each)})
                    ranks.append(RankProcess(self._await_start()))
                self.ranks = ranks  # all or none: who stops us meanwhile meets no half of them
                self._note_ends()
                return self.ranks
            except NurseryLost:  # killed while it started them, perhaps: once more with another
                self._close_nursery()
                if attempt == 2:
                    raise StartFailed(
                        "the ranks cannot be started: the process that they are forked from has ended, twice; "
                        "what it said stands above, else look for a limit on memory or processes"
                    ) from None
        raise AssertionError

    def import_ahead(self, module: str) -> None:
        """Have it imported in ranks that are started from now on."""
        if module not in self._imported_ahead:
            self._imported_ahead.append(module)
            with suppress(NurseryLost):
                self._say({"kind": "import", "module": module})

    def look(self, wait_s: float = 0.0) -> None:
        """Learn which ranks have ended; return early if one has."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                is_news = self._receive(max(deadline - time.monotonic(), 0.0))
            except NurseryLost:
                # The kernel kills its ranks with it; the groups that they have led may outlive them.
                for rank in self.ranks:
                    if rank.is_running:
                        rank.kill_group()
                        rank.exit_code = -signal.SIGKILL
                self._close_nursery()  # whether or not it is quite dead: the next start takes another
                return
            if is_news or time.monotonic() >= deadline:
                return

    def await_ends(self, timeout_s: float) -> bool:
        """Wait until all ranks have ended; have they?"""
        deadline = time.monotonic() + timeout_s
        while any(rank.is_running for rank in self.ranks):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self.look(min(left_s, _PAUSE_S))
        return True

    def end(self) -> None:
        """Kill what still runs, with all that it has started, and let go of it."""
        for rank in self.ranks:
            rank.kill_group()
        self.await_ends(timeout_s=5.0)  # only one that the kernel itself holds up takes longer
        for rank in self.ranks:
            self._ended.pop(rank.pid, None)
            with suppress(NurseryLost):
                self._say({"kind": "let go", "pid": rank.pid})
        self.ranks = []

    def close(self) -> None:
        self.end()
        self._close_nursery()

    def _close_nursery(self) -> None:
        if self._connection is not None:
            self._connection.close()  # it takes that as its own end
            self._connection = None
        if self._nursery is not None:
            try:
                self._nursery.wait(timeout=_FAREWELL_S)
            except subprocess.TimeoutExpired:  # it imports something
                self._nursery.kill()
                self._nursery.wait()
            self._nursery = None
        self._unread, self._started, self._ended = b"", [], {}

    def _say(self, request: dict[str, Any]) -> None:
        if self._connection is None:
            raise NurseryLost
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            raise NurseryLost from None

    def _await_start(self) -> int:
        while not self._started:
            self._receive(_PAUSE_S)
        return self._started.pop()

    def _receive(self, wait_s: float) -> bool:
        """Take what the nursery has said; was it that a rank has ended?"""
        if self._connection is None:
            raise NurseryLost
        readable, _, _ = select.select([self._connection], [], [], wait_s)
        if not readable:
            self._keep_awake()
            return False
        try:
            received = self._connection.recv(_MOST_AT_ONCE)
        except OSError:
            received = b""
        if not received:
            raise NurseryLost
        *lines, self._unread = (self._unread + received).split(b"\n")
        is_news = False
        for message in map(json.loads, lines):
            if message["kind"] == "ended":
                is_news = True
                self._ended[message["pid"]] = message["exit_code"]
            else:
                self._started.append(message["pid"])
        self._note_ends()
        return is_news

    def _keep_awake(self) -> None:
        """A nursery that was stopped (SIGSTOP) tells of no dead and starts nobody: we would wait for ever."""
        state = None if self._nursery is None else state_of(self._nursery.pid)
        if self._nursery is not None and state is not None and state.is_stopped:
            self._nursery.send_signal(signal.SIGCONT)

    def _note_ends(self) -> None:
        for rank in self.ranks:
            if rank.is_running:
                rank.exit_code = self._ended.get(rank.pid)
