"""The processes of a machine's ranks: started, polled and ended through the fork server."""

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
from lockstep.launcher.fork_server import COLD, WARM
from lockstep.supervision.linux_processes import process_state

_MAX_RECEIVED_BYTES = 2**16
_PAUSE_S = 0.02
_CLOSE_WITHIN_S = 0.5
_KILL_WITHIN_S = 5.0
_START_TRIES = 2


class RankProcess:
    """The process of one rank. It leads a process group, with whatever it has started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.exit_code: int | None = None  # None: it is running; negative: the signal that ended it

    @property
    def is_running(self) -> bool:
        """It has not ended, as far as the last poll has shown."""
        return self.exit_code is None

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the rank alone: it ends its data workers and other children itself."""
        if self.is_running:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill the rank and all that it has started. Its process id is not reused until it is released."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class ForkServerLost(Exception):
    """The fork server has ended, and with it all ranks."""


class RankStartError(LockstepError):
    """This machine does not let us start ranks."""


def start_fork_server(connection: int, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Start it in a new interpreter. `connection`: the descriptor of its end of a socket."""
    return subprocess.Popen(
        [sys.executable, "-m", "lockstep.launcher.fork_server", str(connection), *arguments],
        # Torch counts its threads when it is imported.
        env=environment.all_variables() | {"OMP_NUM_THREADS": str(environment.threads_per_process())},
        pass_fds=[connection],
        start_new_session=True,  # signals from the terminal are for the agent
    )


class RankProcesses:
    """All ranks of this machine, in the order of their local ranks; forks of one server: [Note: fork server]."""

    def __init__(self, target: Sequence[str], *, is_warm: bool) -> None:
        """`target` is what the ranks run: a script and its arguments, or `-m module …`."""
        self._target = list(target)
        self._warmth = WARM if is_warm else COLD
        self._server: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._modules_ahead: list[str] = []
        self._unread = b""
        self._started: list[int] = []  # process ids that the server has sent and nobody has taken
        self._exit_codes: dict[int, int] = {}  # by process id; of ranks that have not been released
        self.ranks: list[RankProcess] = []

    def prepare(self) -> None:
        """Start the fork server if it is not running, without waiting: its imports take a second or two."""
        if self._server is not None and self._server.poll() is None:
            return
        self._close_server()
        ours, theirs = socket.socketpair()
        self._server = start_fork_server(theirs.fileno(), [self._warmth, *self._target])
        theirs.close()
        self._connection = ours
        for module in self._modules_ahead:
            self._send({"kind": "import", "module": module})

    def start(self, variables: Sequence[Mapping[str, str]]) -> list[RankProcess]:
        """Start a process for each rank, with the given variables besides our own. Earlier ranks must have ended."""
        for _ in range(_START_TRIES):
            try:
                self.prepare()
                ranks = []
                for each in variables:
                    self._send({"kind": "start", "environment": environment.all_variables() | dict(each)})
                    ranks.append(RankProcess(self._wait_for_start()))
                self.ranks = ranks  # all or none: an interrupt in between must not leave half of them here
                self._note_exits()
                return self.ranks
            except ForkServerLost:  # perhaps it was killed while it started them: try again with a new one
                self._close_server()
        raise RankStartError(
            "the ranks cannot be started: the process that they are forked from has ended, twice; "
            "see its output above, or look for a limit on memory or processes"
        )

    def import_ahead(self, module: str) -> None:
        """Have a module imported in ranks that are started from now on."""
        if module not in self._modules_ahead:
            self._modules_ahead.append(module)
            with suppress(ForkServerLost):
                self._send({"kind": "import", "module": module})

    def poll(self, wait_s: float = 0.0) -> None:
        """Learn which ranks have ended; wait for that, but return as soon as one has."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                has_ended = self._receive(max(deadline - time.monotonic(), 0.0))
            except ForkServerLost:
                # The kernel kills the ranks with it; the process groups that they have led may outlive them.
                for rank in self.ranks:
                    if rank.is_running:
                        rank.kill_group()
                        rank.exit_code = -signal.SIGKILL
                self._close_server()  # even if it still lives: the next start uses a new one
                return
            if has_ended or time.monotonic() >= deadline:
                return

    def wait_for_ends(self, timeout_s: float) -> bool:
        """Wait until all ranks have ended; return whether they have."""
        deadline = time.monotonic() + timeout_s
        while any(rank.is_running for rank in self.ranks):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return False
            self.poll(min(left_s, _PAUSE_S))
        return True

    def end(self) -> None:
        """Kill the ranks that still run, with all that they have started, and release them."""
        for rank in self.ranks:
            rank.kill_group()
        self.wait_for_ends(_KILL_WITHIN_S)  # it takes longer only if the kernel itself holds a process up
        for rank in self.ranks:
            self._exit_codes.pop(rank.pid, None)
            with suppress(ForkServerLost):
                self._send({"kind": "release", "pid": rank.pid})
        self.ranks = []

    def close(self) -> None:
        """End the ranks and the fork server."""
        self.end()
        self._close_server()

    def _close_server(self) -> None:
        if self._connection is not None:
            self._connection.close()  # which the server takes as a request to end
            self._connection = None
        if self._server is not None:
            try:
                self._server.wait(timeout=_CLOSE_WITHIN_S)
            except subprocess.TimeoutExpired:  # it is importing something
                self._server.kill()
                self._server.wait()
            self._server = None
        self._unread, self._started, self._exit_codes = b"", [], {}

    def _send(self, request: dict[str, Any]) -> None:
        if self._connection is None:
            raise ForkServerLost
        try:
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            raise ForkServerLost from None

    def _wait_for_start(self) -> int:
        while not self._started:
            self._receive(_PAUSE_S)
        return self._started.pop()

    def _receive(self, wait_s: float) -> bool:
        """Handle the server's messages; return whether one of them was that a rank has ended."""
        if self._connection is None:
            raise ForkServerLost
        readable, _, _ = select.select([self._connection], [], [], wait_s)
        if not readable:
            self._resume_server_if_stopped()
            return False
        try:
            received = self._connection.recv(_MAX_RECEIVED_BYTES)
        except OSError:
            received = b""
        if not received:
            raise ForkServerLost
        *lines, self._unread = (self._unread + received).split(b"\n")
        has_ended = False
        for message in map(json.loads, lines):
            if message["kind"] == "ended":
                has_ended = True
                self._exit_codes[message["pid"]] = message["exit_code"]
            else:
                self._started.append(message["pid"])
        self._note_exits()
        return has_ended

    def _resume_server_if_stopped(self) -> None:
        """A server that was stopped (SIGSTOP) reports no dead rank and starts none: we would wait forever."""
        state = None if self._server is None else process_state(self._server.pid)
        if self._server is not None and state is not None and state.is_stopped:
            self._server.send_signal(signal.SIGCONT)

    def _note_exits(self) -> None:
        for rank in self.ranks:
            if rank.is_running:
                rank.exit_code = self._exit_codes.get(rank.pid)
