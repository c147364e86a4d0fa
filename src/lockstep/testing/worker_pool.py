"""The worker processes behind `ranks(n)`: started on first use, reused from call to call, replaced when they die.

Importing torch takes longer than most tests, so a test session does it once per worker and not once per test.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from multiprocessing.reduction import send_handle

from lockstep.launcher.worker_main import STACK_DUMP_SIGNAL
from lockstep.testing.rank_worker import Call, FromCaller, FromWorker, Ready, receive_from_worker, send, serve

_START_TIMEOUT_S = 120.0
_EXIT_TIMEOUT_S = 3.0  # for a worker that was asked to exit; then it is killed
_STACK_TIMEOUT_S = 2.0  # for a worker to write its stack; a stopped one never does
_POLL_S = 0.02


class WorkerProcess:
    """The caller's handle on one worker process."""

    def __init__(self, index: int) -> None:
        # Spawned, not forked: a fork would inherit the caller's locks and its running torch.
        context = multiprocessing.get_context("spawn")
        self.pipe, workers_end = context.Pipe()
        self.process = context.Process(target=serve, args=(workers_end,), name=f"lockstep-rank-{index}")
        self.process.start()
        workers_end.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        # Ready to read when the process ends, even if a process it forked lives on and keeps its pipes open.
        self.death = os.pidfd_open(self.pid)
        # Both sides hold the same unnamed file: nothing to clean up, and readable after the worker's death.
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the worker)
        send_handle(self.pipe, self._stacks.fileno(), self.pid)
        self.is_ready = False
        self._is_reaped = False

    @property
    def is_alive(self) -> bool:
        """Whether the process is running."""
        # Not `process.is_alive()`: that stays true if somebody else has already fetched the exit code.
        return not wait([self.death], 0)

    def await_start(self) -> None:
        """Wait until the worker is ready for its first call."""
        if self.is_ready:
            return
        wait([self.pipe, self.death], _START_TIMEOUT_S)
        if not isinstance(self.receive(), Ready):
            self.kill()
            raise RuntimeError(f"a rank's process did not start: {self.describe_exit()}; see its stderr for the reason")

    def begin(self, call: Call) -> None:
        """Send the worker a call."""
        self.is_ready = False
        # The file offset is shared too: without the seek, the worker's next stack would follow a hole.
        self._stacks.truncate(0)
        self._stacks.seek(0)
        self.send(call)

    def send(self, message: FromCaller) -> None:
        """Send the worker a message, unless it is dead."""
        with contextlib.suppress(ConnectionError):  # the caller watches for the worker's death anyway
            send(self.pipe, message)

    def receive(self) -> FromWorker | None:
        """Return the worker's next message, or None if it died instead of sending one."""
        try:
            message = receive_from_worker(self.pipe) if self.pipe.poll() else None
        except (EOFError, OSError):
            return None
        self.is_ready = isinstance(message, Ready)
        return message

    def request_stack(self) -> None:
        """Ask the worker to write its stack."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.death, STACK_DUMP_SIGNAL)

    @property
    def stack(self) -> str:
        """The stack that the worker wrote on request or at a fatal signal; empty if it wrote none."""
        descriptor = self._stacks.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace").rstrip()

    def kill(self) -> None:
        """Kill the process, and all it started that stayed in its process group."""
        if self._is_reaped:
            return  # its process id may belong to another process by now
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.death, signal.SIGKILL)  # it may not have its own group yet
        self.process.join()
        self.is_ready = False
        self._is_reaped = True

    def describe_exit(self) -> str:
        """Wait for a dying worker, kill all it started, and return how it ended."""
        self.process.join(_EXIT_TIMEOUT_S)
        self.kill()
        code = self.process.exitcode
        if code is None:
            how = "ended, and another waiter fetched its exit code"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        return f"process {self.pid} {how}"

    def dispose(self) -> None:
        """Kill the process, and close its pipe and file descriptors."""
        self.kill()
        self.pipe.close()
        self._stacks.close()
        os.close(self.death)


class WorkerPool:
    """Workers by rank; a call of size n takes the first n."""

    def __init__(self) -> None:
        self._workers: list[WorkerProcess] = []
        # Registered after multiprocessing's own handler, so run before it: that handler would wait for the workers.
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        """The process ids of the living workers, in rank order."""
        return [worker.pid for worker in self._workers if worker.is_alive]

    def first(self, count: int) -> list[WorkerProcess]:
        """Return the first `count` workers, ready for a call; missing and dead ones are started, all at once."""
        for index, worker in enumerate(self._workers):
            if index < count and not (worker.is_ready and worker.is_alive):
                worker.dispose()
                self._workers[index] = WorkerProcess(index)
        self._workers += [WorkerProcess(index) for index in range(len(self._workers), count)]
        for worker in self._workers[:count]:
            worker.await_start()
        return self._workers[:count]

    def close(self) -> None:
        """End every worker. The next call starts new ones."""
        for worker in self._workers:
            worker.pipe.close()  # idle workers exit then
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        for worker in self._workers:
            worker.process.join(max(deadline - time.monotonic(), 0))
            worker.dispose()
        self._workers.clear()


def collect_stacks(workers: Sequence[WorkerProcess]) -> list[str]:
    """Return each worker's current Python stack, even if it is waiting in C code, with or without the GIL."""
    for worker in workers:
        worker.request_stack()
    deadline = time.monotonic() + _STACK_TIMEOUT_S
    # A stack is written line by line, innermost frame first and the main thread last.
    while not all(worker.stack.endswith("in <module>") for worker in workers) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return [worker.stack or f"process {worker.pid} did not answer; is it stopped?" for worker in workers]


shared_pool = WorkerPool()  # one per process, so that all callers share its workers


def close_pool() -> None:
    """End every worker now instead of at the end of this process. The next call starts new ones."""
    shared_pool.close()


def pool_pids() -> list[int]:
    """Return the process ids of the living workers, in rank order."""
    return shared_pool.pids
