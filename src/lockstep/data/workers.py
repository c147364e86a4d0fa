"""Who fetches: this process, or worker processes ahead of it. Either way results come in the order of the requests."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, Protocol, TypeAlias

import torch
from torch.utils.data import DataLoader, Dataset

from lockstep.errors import UserError
from lockstep.launcher.kinship import die_with_parent
from lockstep.supervision import pulse
from lockstep.supervision.process import signal_name
from lockstep.supervision.stop_signals import STOP_SIGNALS
from lockstep.world.world import World

WorkerInit: TypeAlias = Callable[[int], None]

_END_WITHIN_S = 1.0  # a process that ends closes its connections first


class Fetches(Protocol):
    """Answers requests; a copy of it does so in each worker process."""

    def fetch(self, request: Any) -> Any: ...


@dataclass(frozen=True)
class Workers:
    """`count` processes that fetch; 0: this process does. `init(number)` is called first in each."""

    count: int
    init: WorkerInit | None = None

    def __post_init__(self) -> None:
        if self.count < 0:
            raise UserError(f"workers={self.count}: expected 0 (this process fetches) or more")

    @contextmanager
    def fetched(self, source: Fetches, requests: Iterable[Any], ahead: int, world: World) -> Iterator[Iterator[Any]]:
        """What `source` has for each request, `ahead` of them in advance; workers end with the context.

        Requests go to the workers in turn: the k-th of them to worker k mod `count`.
        """
        if self.count == 0:
            yield map(source.fetch, requests)
            return
        with pulse.data_workers(self.count) as places:
            results = iter(
                DataLoader(
                    _Answers(source),
                    batch_size=None,  # a request is for whole lanes, and its answer is collated already
                    sampler=requests,
                    collate_fn=_as_it_is,
                    num_workers=self.count,
                    prefetch_factor=-(-ahead // self.count),
                    pin_memory=world.device.type == "cuda",
                    worker_init_fn=_Begin(os.getpid(), places, self.init),
                    generator=torch.Generator(),  # else it draws a number from the caller's
                )
            )
            try:
                yield _answers(results)
            finally:
                # torch does this when the iterator is collected, but a traceback that is kept would put that off.
                results._shutdown_workers()  # type: ignore[attr-defined]


def _answers(results: Any) -> Iterator[Any]:
    """What torch's iterator has. A worker that dies while a tensor is taken from it shows as a lost connection only."""
    try:
        yield from results
    except (OSError, EOFError) as error:
        ended = wait([worker.sentinel for worker in results._workers], timeout=_END_WITHIN_S)
        dead = next((worker for worker in results._workers if worker.sentinel in ended), None)
        if dead is None:
            raise
        dead.join()
        how = signal_name(-dead.exitcode) if dead.exitcode < 0 else f"exit code {dead.exitcode}"
        raise RuntimeError(f"DataLoader worker (pid {dead.pid}) has died ({how})") from error


@dataclass(frozen=True)
class _Begin:
    """What a worker process does first."""

    parent: int
    places: Sequence[int]  # in its rank's page
    init: WorkerInit | None

    def __call__(self, number: int) -> None:
        die_with_parent(self.parent)
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # the rank answers them, and needs its data for that
        pulse.begin_data_worker(number, self.places)
        if self.init is not None:
            self.init(number)


class _Answers(Dataset[Any]):
    """A source as torch's DataLoader sees it: requests are the indices."""

    def __init__(self, source: Fetches) -> None:
        self._source = source

    def __getitem__(self, request: Any) -> Any:
        return self._source.fetch(request)


def _as_it_is(answer: Any) -> Any:
    return answer  # torch's default would turn numpy arrays into tensors, which in-process fetching does not
