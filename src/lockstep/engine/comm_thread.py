"""The communication thread: messages between ranks while the backward pass is still running.

Sends and receives between two ranks match by order, so every rank must start them in the same order. The training
thread cannot guarantee that, because the timing of backward hooks differs from rank to rank. So it only submits jobs,
in the same order on every rank, and one thread runs them one after another:

    training thread    | backward … bucket 0 ready: submit … bucket 1 ready: submit … | finish: wait for results |
    lockstep-comm      |                            [all-reduce bucket 0]        [all-reduce bucket 1]           |

A job may call `exchange` and `scratch`, and may block until other ranks respond. On CUDA it runs on a separate stream,
which first waits for the kernels that the training thread launched before it submitted the job.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import UserError
from lockstep.world.world import World

T = TypeVar("T")


class Message(NamedTuple):
    """A tensor to send to, or to receive from, another rank."""

    peer: int
    tensor: Tensor


class CommJob(NamedTuple):
    """A submitted job."""

    future: Future[Any]
    finished: torch.cuda.Event | None

    def result(self) -> Any:
        """Wait for the job and return its result, or raise what it raised. On CUDA the current stream waits."""
        value = self.future.result()
        if self.finished is not None:
            torch.cuda.current_stream().wait_event(self.finished)
        return value


class CommThread:
    """Runs jobs one after another on its own thread, with its own process group.

    The user's own collectives cannot come between the jobs' messages, because those use another group.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.group = dist.new_group(timeout=timedelta(seconds=world.timeout_s)) if world.size > 1 else None
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # A daemon: a rank that fails must be able to exit even while this thread waits for a rank that never answers.
        self._thread = Thread(target=self._work, name="lockstep-comm", daemon=True)
        self._thread.start()
        # Tensors to send must be on this device: gloo sends from host memory only.
        self.device = torch.device("cpu") if world.backend == "gloo" else world.device
        self._on_cuda = self.device.type == "cuda"
        self._stream = torch.cuda.Stream(world.device) if self._on_cuda else None  # type: ignore[no-untyped-call]
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.bytes_sent = 0
        self._busy_s = 0.0
        self._is_timed = False
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._is_closed = False

    def submit(self, job: Callable[..., Any], *args: Any) -> CommJob:
        """Queue `job(*args)`. Every rank must submit its jobs in the same order."""
        if self._stream is None:
            return CommJob(self._enqueue(partial(job, *args)), None)
        ready, began = torch.cuda.Event(), None  # type: ignore[no-untyped-call]
        if self._is_timed:
            began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        finished = torch.cuda.Event(enable_timing=began is not None)  # type: ignore[no-untyped-call]
        ready.record()
        return CommJob(self._enqueue(partial(self._run_on_stream, ready, began, finished, job, *args)), finished)

    def busy_s(self, *, timed: bool) -> float:
        """Return how many seconds jobs have taken so far, including the wait for other ranks.

        On CUDA only jobs submitted while timing was on count; synchronize the device first. `timed` turns timing on or
        off from now on.
        """
        if self._stream is not None:
            self._busy_s += sum(began.elapsed_time(ended) for began, ended in self._timed) / 1000
            self._timed.clear()
            self._is_timed = timed
        return self._busy_s

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive at once, and wait for both (on CUDA: in stream order). Empty tensors are skipped."""
        sends = [message for message in sends if message.tensor.numel()]
        receives = [message for message in receives if message.tensor.numel()]
        if not sends and not receives:
            return
        self.bytes_sent += sum(message.tensor.nbytes for message in sends)
        works: list[dist.Work | None] = []
        if self._on_cuda:
            works += dist.batch_isend_irecv(
                [dist.P2POp(dist.irecv, message.tensor, message.peer, self.group) for message in receives]
                + [dist.P2POp(dist.isend, message.tensor, message.peer, self.group) for message in sends]
            )
        else:
            works += [dist.irecv(m.tensor, m.peer, self.group, tag) for tag, m in _with_tags(receives)]
            works += [dist.isend(m.tensor, m.peer, self.group, tag) for tag, m in _with_tags(sends)]
        for work in works:
            if work is not None:
                work.wait()

    def scratch(self, like: Tensor, length: int) -> Tensor:
        """Return memory to receive into, of the dtype and device of `like`; valid until the next job.

        The memory is kept, because page faults make fresh memory slow.
        """
        key = (like.dtype, like.device)
        if key not in self._scratch or self._scratch[key].numel() < length:
            self._scratch[key] = like.new_empty(length)
        return self._scratch[key][:length]

    def close(self, *, abandon: bool = False) -> None:
        """Finish all submitted jobs, end the thread, and destroy the process group.

        `abandon`: wait for nothing, and keep the group. Destroying it would break the other ranks' connections, and
        their errors would hide the one that made this rank fail.
        """
        self._is_closed = True
        self._jobs.put(None)
        if abandon:
            return
        self._thread.join()
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
            self.group = None

    def _enqueue(self, job: Callable[[], Any]) -> Future[Any]:
        if self._is_closed:  # the job would never run
            raise UserError("this step's training loop has ended: use a step inside `for step in run.steps(…):` only")
        future: Future[Any] = Future()
        self._jobs.put((future, job))
        return future

    def _work(self) -> None:
        failure: BaseException | None = None
        while (entry := self._jobs.get()) is not None:
            future, job = entry
            if failure is None:
                began = time.perf_counter()
                try:
                    value = job()
                    if self._stream is None:
                        self._busy_s += time.perf_counter() - began
                    future.set_result(value)
                    continue
                except BaseException as error:
                    failure = error
            # After a failure the ranks no longer agree on the next message, so nothing more is sent.
            future.set_exception(failure)

    def _run_on_stream(
        self,
        ready: torch.cuda.Event,
        began: torch.cuda.Event | None,
        finished: torch.cuda.Event,
        job: Callable[..., T],
        *args: Any,
    ) -> T:
        assert self._stream is not None
        torch.cuda.set_device(self._world.device)
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(ready)
            if began is not None:
                began.record()
                self._timed.append((began, finished))
            value = job(*args)
            finished.record()
        return value


def _with_tags(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    """Number the messages to each peer from 0: the tag by which both sides match them."""
    numbers: Counter[int] = Counter()
    for message in messages:
        yield numbers[message.peer], message
        numbers[message.peer] += 1
