"""The engine's line to the other ranks: one thread, one order of messages, overlapping with the computation."""

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
    peer: int
    tensor: Tensor


class Job(NamedTuple):
    """A job handed to the channel; `result()` waits for it."""

    future: Future[Any]
    finished: torch.cuda.Event | None

    def result(self) -> Any:
        value = self.future.result()
        if self.finished is not None:
            torch.cuda.current_stream().wait_event(self.finished)
        return value


class Channel:
    """Runs jobs one after another on a thread of its own.

    Messages must begin in the same order on every rank. Jobs are submitted in the same order everywhere and run on one
    thread, so they do, whatever the timing. The group is the channel's own: a user's collectives cannot slip between.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.group = dist.new_group(timeout=timedelta(seconds=world.timeout_s)) if world.size > 1 else None
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        # A daemon: a rank that fails must be able to leave, even while this waits for one that will never answer.
        self._thread = Thread(target=self._work, name="lockstep-channel", daemon=True)
        self._thread.start()
        # What travels lies where the backend can take it from: gloo sends from main memory only.
        self.carrier = torch.device("cpu") if world.backend == "gloo" else world.device
        self._on_cuda = self.carrier.type == "cuda"
        self._stream = torch.cuda.Stream(world.device) if self._on_cuda else None  # type: ignore[no-untyped-call]
        self._scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self.bytes_sent = 0
        self._busy_s = 0.0
        self._is_timed = False
        self._timed: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._is_closed = False

    def submit(self, job: Callable[..., Any], *args: Any) -> Job:
        if self._stream is None:
            return Job(self._enqueue(partial(job, *args)), None)
        ready, began = torch.cuda.Event(), None  # type: ignore[no-untyped-call]
        if self._is_timed:
            began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        finished = torch.cuda.Event(enable_timing=began is not None)  # type: ignore[no-untyped-call]
        ready.record()
        return Job(self._enqueue(partial(self._run_on_stream, ready, began, finished, job, *args)), finished)

    def busy_s(self, *, timed: bool) -> float:
        """How long jobs have taken, waiting for other ranks included; on CUDA, those of timed stretches.

        `timed`: from now on, time what is done there. Call it when the device has come to its end.
        """
        if self._stream is not None:
            self._busy_s += sum(began.elapsed_time(ended) for began, ended in self._timed) / 1000
            self._timed.clear()
            self._is_timed = timed
        return self._busy_s

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        """Send and receive at once; returns when all is there (on CUDA: in stream order). Nothing empty is sent."""
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
            works += [dist.irecv(m.tensor, m.peer, self.group, tag) for tag, m in _numbered(receives)]
            works += [dist.isend(m.tensor, m.peer, self.group, tag) for tag, m in _numbered(sends)]
        for work in works:
            if work is not None:
                work.wait()

    def scratch(self, like: Tensor, length: int) -> Tensor:
        """Memory for a job to receive into, valid until the next job. Kept, because fresh memory is slow to touch."""
        key = (like.dtype, like.device)
        if key not in self._scratch or self._scratch[key].numel() < length:
            self._scratch[key] = like.new_empty(length)
        return self._scratch[key][:length]

    def close(self, *, abandon: bool = False) -> None:
        """Let the jobs that were submitted come to their end, then the thread.

        `abandon`: wait for nothing, and leave the group standing. Taking it down would break the others' connections
        first, and they would look like the cause of whatever made this rank leave.
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
        if self._is_closed:  # nobody would ever answer
            raise UserError("the loop that this step belongs to was left: use it inside `for step in run.steps(…):`")
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
            # After a failure the ranks are no longer at the same message: nothing more is sent.
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


def _numbered(messages: Sequence[Message]) -> Iterator[tuple[int, Message]]:
    """Messages between the same two ranks are told apart by a number: the first is 0 for both."""
    numbers: Counter[int] = Counter()
    for message in messages:
        yield numbers[message.peer], message
        numbers[message.peer] += 1
