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

from lockstep.launcher.worker import STACK_DUMP_SIGNAL
from lockstep.testing.messages import Call, FromCaller, FromWorker, Ready, receive_from_worker, send
from lockstep.testing.worker import serve

START_LIMIT_S = 120.0
FAREWELL_S = 3.0  # for a worker told to go; then it is killed
STACK_LIMIT_S = 2.0  # for a worker to write its stack; one that is stopped never does
_POLL_S = 0.02


class Worker:
    """The caller's hold on one worker process."""

    def __init__(self, index: int) -> None:
        # Spawned, not forked: a fork would share the caller's threads, locks and already-started torch.
        context = multiprocessing.get_context("spawn")
        self.pipe, workers_end = context.Pipe()
        self.process = context.Process(target=serve, args=(workers_end,), name=f"lockstep-rank-{index}")
        self.process.start()
        workers_end.close()
        assert self.process.pid is not None
        self.pid = self.process.pid
        # Ready to read when the process ends, even if a process it forked lives on and keeps its pipes open.
        self.death = os.pidfd_open(self.pid)
        # Both sides hold the same nameless file: nothing to clean up, and readable after the worker's death.
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the worker)
        send_handle(self.pipe, self._stacks.fileno(), self.pid)
        self.is_ready = False
        self._is_buried = False

    @property
    def is_alive(self) -> bool:
        # Not multiprocessing's answer: it takes a worker whose exit code somebody else fetched to be running for ever.
        return not wait([self.death], 0)

    def await_start(self) -> None:
        if self.is_ready:
            return
        wait([self.pipe, self.death], START_LIMIT_S)
        if not isinstance(self.receive(), Ready):
            self.kill()
            raise RuntimeError(f"a rank's process did not start: {self.bury()}; its stderr may say why")

    def begin(self, call: Call) -> None:
        self.is_ready = False
        # The offset is shared too: without the seek the worker's next words would follow a hole.
        self._stacks.truncate(0)
        self._stacks.seek(0)
        self.tell(call)

    def tell(self, message: FromCaller) -> None:
        with contextlib.suppress(ConnectionError):  # its death is news that the caller is waiting for anyway
            send(self.pipe, message)

    def receive(self) -> FromWorker | None:
        """The worker's next message; None if it died instead of sending one."""
        try:
            message = receive_from_worker(self.pipe) if self.pipe.poll() else None
        except (EOFError, OSError):
            return None
        self.is_ready = isinstance(message, Ready)
        return message

    def request_stack(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.death, STACK_DUMP_SIGNAL)

    @property
    def stack(self) -> str:
        """What the worker wrote on request, or on its own at a fatal signal; empty if it has not."""
        descriptor = self._stacks.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace").rstrip()

    def kill(self) -> None:
        """End the process and all it started that stayed in its group."""
        if self._is_buried:
            return  # its number may by now be somebody else's
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.death, signal.SIGKILL)  # it may not have reached its own group yet
        self.process.join()
        self.is_ready = False
        self._is_buried = True

    def bury(self) -> str:
        """See a dying worker out, with all it started, and say how it ended."""
        self.process.join(FAREWELL_S)
        self.kill()
        code = self.process.exitcode
        if code is None:
            how = "ended, and somebody else fetched its exit code"
        elif code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        else:
            how = f"exited with code {code}"
        return f"process {self.pid} {how}"

    def dispose(self) -> None:
        self.kill()
        self.pipe.close()
        self._stacks.close()
        os.close(self.death)


class Pool:
    """Workers by rank; a call of size n takes the first n."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        # Registered after multiprocessing's own handler and so run before it: that one would wait for the workers.
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker.is_alive]

    def first(self, count: int) -> list[Worker]:
        """The first `count` workers, all ready for a call; missing and dead ones are started together."""
        for index, worker in enumerate(self._workers):
            if index < count and not (worker.is_ready and worker.is_alive):
                worker.dispose()
                self._workers[index] = Worker(index)
        self._workers += [Worker(index) for index in range(len(self._workers), count)]
        for worker in self._workers[:count]:
            worker.await_start()
        return self._workers[:count]

    def close(self) -> None:
        """End every worker. The next call starts new ones."""
        for worker in self._workers:
            worker.pipe.close()  # idle workers leave at that
        deadline = time.monotonic() + FAREWELL_S
        for worker in self._workers:
            worker.process.join(max(deadline - time.monotonic(), 0))
            worker.dispose()
        self._workers.clear()


def collect_stacks(workers: Sequence[Worker]) -> list[str]:
    """Where each worker is, in Python, now: also when it waits in C code, with or without the interpreter's lock."""
    for worker in workers:
        worker.request_stack()
    deadline = time.monotonic() + STACK_LIMIT_S
    # It is written line by line, innermost frame first and the main thread last.
    while not all(worker.stack.endswith("in <module>") for worker in workers) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return [worker.stack or f"process {worker.pid} did not answer: stopped?" for worker in workers]


POOL = Pool()  # one for all callers in this process: sharing the workers is what it is for


def close_pool() -> None:
    """End every worker now; otherwise they end with this process. The next call starts new ones."""
    POOL.close()


def pool_pids() -> list[int]:
    """The process ids of the living workers, worker of rank 0 first."""
    return POOL.pids
