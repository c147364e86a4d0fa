"""Fetch samples in this process or ahead in worker processes; results come in the order of the requests.

[Note: DataLoader internals] Workers are those of torch's DataLoader. The functions at the end of this file are the only
ones to use names that it does not make public (last seen in torch 2.13); each checks whether its name still exists.

[Note: inherited garbage] A worker is a fork of its rank, and inherits objects that the rank has not collected yet. It
must not collect them either: a process group of an earlier run, for one, would wait for threads that only the rank has.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from lockstep.config.argument_checks import MAX_WORKERS
from lockstep.config.tested_versions import TESTED_TORCH
from lockstep.errors import UserError
from lockstep.supervision import heartbeat
from lockstep.supervision.linux_processes import die_with_parent, signal_name
from lockstep.supervision.stop_signals import STOP_SIGNALS
from lockstep.world.world import World

WorkerInit: TypeAlias = Callable[[int], None]

_EXIT_TIMEOUT_S = 1.0  # a process that exits closes its connections first


class Fetcher(Protocol):
    """Answers requests; in worker processes, a copy of it in each."""

    @property
    def dataset(self) -> Any:
        """The user's data set, which it reads."""

    def fetch(self, request: Any) -> Any:
        """The answer to a request."""


@dataclass(frozen=True)
class Workers:
    """The worker processes that fetch samples, and how far ahead.

    Args:
        count: the number of worker processes; with 0 this process fetches the samples.
        init: called first in each worker, with its number.
        prefetch: how many global batches are fetched ahead.
    """

    count: int
    init: WorkerInit | None = None
    prefetch: int = 2

    def __post_init__(self) -> None:
        if self.prefetch < 1:
            raise UserError(f"prefetch={self.prefetch}: expected 1 or more global batches")
        if self.count < 0:
            raise UserError(f"workers={self.count}: expected 0 (this process fetches) or more")
        if self.count > MAX_WORKERS:
            raise UserError(f"workers={self.count}: expected at most {MAX_WORKERS} processes for each rank")

    @contextmanager
    def fetched(self, source: Fetcher, requests: Iterable[Any], ahead: int, world: World) -> Iterator[Iterator[Any]]:
        """The answers of `source` to the requests, in order, up to `ahead` of them fetched in advance.

        Requests go to the workers in turn, the k-th one to worker k mod `count`. The workers end with the context.
        """
        if self.count == 0:
            yield map(source.fetch, requests)
            return
        with heartbeat.data_worker_slots(self.count) as slots:
            loader = DataLoader(
                _FetchDataset(source),
                batch_size=None,  # a request is for whole lanes, and its answer is already collated
                sampler=requests,
                collate_fn=_unchanged,
                num_workers=self.count,
                prefetch_factor=-(-ahead // self.count),
                pin_memory=world.device.type == "cuda",
                worker_init_fn=_WorkerStart(os.getpid(), slots, self.init, collects_garbage=gc.isenabled()),
                generator=torch.Generator(),  # without one it draws a number from the caller's generator
                multiprocessing_context=_context_without_event_locks(),
            )
            with _without_collecting_garbage():  # [Note: inherited garbage]
                results = iter(loader)
            try:
                yield _answers(results)
            finally:
                # torch does this when the iterator is garbage-collected, which a saved traceback would delay.
                shut_down_workers(results)


class _EventWithoutLock:
    """What torch's DataLoader and its workers use of a `multiprocessing.Event`.

    Python's has a lock, also for asking whether it is set: a rank whose worker is killed at that moment would wait for
    it for ever.
    """

    def __init__(self, context: BaseContext) -> None:
        self._flag = context.RawValue(ctypes.c_bool, False)

    def is_set(self) -> bool:
        return bool(self._flag.value)

    def set(self) -> None:
        self._flag.value = True


def _context_without_event_locks() -> BaseContext:
    """Return the default way to start processes, but with other events."""
    context = copy(multiprocessing.get_context())
    context.Event = partial(_EventWithoutLock, context)  # type: ignore[method-assign, assignment]
    return context


@contextmanager
def _without_collecting_garbage() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _answers(results: Any) -> Iterator[Any]:
    """The results; if a connection is lost because a worker has died, the error says so."""
    try:
        yield from results
    except (OSError, EOFError) as error:
        processes = worker_processes(results)
        ended = wait([worker.sentinel for worker in processes], timeout=_EXIT_TIMEOUT_S)
        dead = next((worker for worker in processes if worker.sentinel in ended), None)
        if dead is None:
            raise
        dead.join()
        how = signal_name(-dead.exitcode) if dead.exitcode < 0 else f"exit code {dead.exitcode}"
        raise RuntimeError(f"DataLoader worker (pid {dead.pid}) has died ({how})") from error


@dataclass(frozen=True)
class _WorkerStart:
    """What a worker process does first."""

    parent: int
    slots: Sequence[int]  # in its rank's heartbeat page
    init: WorkerInit | None
    collects_garbage: bool

    def __call__(self, number: int) -> None:
        gc.freeze()  # [Note: inherited garbage]
        if self.collects_garbage:
            gc.enable()
        die_with_parent(self.parent)
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # the rank handles them, and needs its data until it has stopped
        heartbeat.begin_data_worker(number, self.slots)
        if self.init is not None:
            show_dataset()
            self.init(number)


class _FetchDataset(Dataset[Any]):
    """A source as a data set for torch's DataLoader: its indices are requests."""

    def __init__(self, source: Fetcher) -> None:
        self.source = source

    def __getitem__(self, request: Any) -> Any:
        return self.source.fetch(request)


def _unchanged(answer: Any) -> Any:
    return answer  # torch's default would turn numpy arrays into tensors, which fetching in this process does not


# What torch's DataLoader does not make public. [Note: DataLoader internals]


def shut_down_workers(results: Any) -> None:
    """End the worker processes of a DataLoader's iterator now, instead of when it is garbage-collected."""
    shut_down = getattr(results, "_shutdown_workers", None)
    if shut_down is not None:
        shut_down()


def worker_processes(results: Any) -> list[Any]:
    """The worker processes of a DataLoader's iterator; empty if they are not known."""
    return list(getattr(results, "_workers", ()))


def show_dataset() -> None:
    """Make `torch.utils.data.get_worker_info().dataset` the user's data set, for functions that prepare it."""
    info: Any = get_worker_info()
    if info is not None and isinstance(info.dataset, _FetchDataset):
        object.__setattr__(info, "dataset", info.dataset.source.dataset)  # its own __setattr__ refuses


def hide_worker_info() -> None:
    """Make `torch.utils.data.get_worker_info()` return None in this worker process.

    A data set that splits itself among the workers it sees would lose samples, because lockstep splits it already.
    """
    if get_worker_info() is None:
        return
    try:
        import torch.utils.data._utils.worker as torch_worker
    except ImportError:
        pass
    else:
        torch_worker._worker_info = None
    if get_worker_info() is not None:
        raise UserError(
            f"worker processes cannot read iterable data sets with torch {torch.__version__}, whose get_worker_info() "
            f"cannot be made to return None: use workers=0, or {TESTED_TORCH}"
        )
