"""The agent of one machine: torch's elastic agent, with our store, our worker module and our words for a failure."""

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import torch
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lockstep.config import environment
from lockstep.config.environment import Node, is_loopback
from lockstep.errors import EXIT_STOPPED
from lockstep.launcher.failure import RankEnd, Verdict, explain, only_victims, read_announced_end, read_report
from lockstep.launcher.rendezvous import FreshStoreRendezvous
from lockstep.launcher.store import loopback_interface

_POLL_INTERVAL_S = 0.1
_CAUSE_MAY_LAG_S = 3.0
_INTERRUPT_GRACE_S = 5.0


def count_devices() -> int:
    """How many processes `-n auto` means: one per GPU, or one per core that this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_agent(
    command: Sequence[str], nproc: int, node: Node, *, max_restarts: int = 0, rdzv_endpoint: str | None = None
) -> int:
    """Run `command` on `nproc` processes until all are done or one fails; return the exit code."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        spec = WorkerSpec(
            role="default",
            local_world_size=nproc,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=_rendezvous(node, rdzv_endpoint),
            max_restarts=max_restarts,
            monitor_interval=_POLL_INTERVAL_S,
        )
        agent = _Agent(spec, Path(folder), say=lambda text: print(f"lockstep: {text}", file=sys.stderr, flush=True))
        with _quiet_elastic(), _signal_handlers_restored(), environment.exported(_for_workers(node, folder)):
            try:
                result = agent.run()
            except SignalException as stop:
                agent.say(f"stopped on request ({stop.sigval.name})")
                return EXIT_STOPPED
    if result is None or result.is_failed():
        return agent.verdict.exit_code if agent.verdict else EXIT_STOPPED
    return 0


class _Agent(LocalElasticAgent):
    """Sees each rank's end as it happens: afterwards the elastic agent has stopped the rest, and all look alike."""

    def __init__(self, spec: WorkerSpec, failure_folder: Path, say: Callable[[str], None]) -> None:
        super().__init__(spec, DefaultLogsSpecs(log_dir=os.devnull))
        self.say = say
        self.verdict: Verdict | None = None
        self._failure_folder = failure_folder

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ends = self._ends(worker_group)
        if any(end.exit_code for end in ends):
            ends = self._await_the_cause(worker_group)
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed():
            if not any(end.exit_code for end in ends):  # a rank ended after we had looked
                ends = [_less_our_own_signal(end) for end in self._ends(worker_group)]
            self.verdict = explain(ends, worker_group.workers[0].world_size)
            for message in self.verdict.messages:
                self.say(message)
            if self._remaining_restarts > 0:
                self.say(f"restarting all ranks ({self._remaining_restarts} restarts left)")
            for path in self._failure_folder.iterdir():
                path.unlink()
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **limits: Any) -> None:
        """Ask the ranks to end; while we wait for them, one more signal kills them at once.

        The rest is what this torch's agent passes itself: 2.13 a timeout, 2.11 nothing.
        """
        running = [process for process in self._processes().values() if process.poll() is None]
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: _send(running, signal.SIGKILL))
        if running:  # said only now: who reads it may take us at our word at once
            self.say(f"stopping {len(running)} ranks ({death_sig.name}); once more to kill them at once")
        if death_sig == signal.SIGINT:
            # Python may lose an interrupt, in an import for one: what is left after a while is asked in plainer words.
            _send(running, signal.SIGINT)
            deadline = time.monotonic() + _INTERRUPT_GRACE_S
            while any(process.poll() is None for process in running) and time.monotonic() < deadline:
                time.sleep(_POLL_INTERVAL_S)
            death_sig = signal.SIGTERM
        super()._shutdown(death_sig, *args, **limits)

    def _await_the_cause(self, worker_group: WorkerGroup) -> list[RankEnd]:
        """A rank closes its connections before it is quite dead: its victims can be seen to end first."""
        deadline = time.monotonic() + _CAUSE_MAY_LAG_S
        while only_victims(ends := self._ends(worker_group)) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S / 2)
        return ends

    def _ends(self, worker_group: WorkerGroup) -> list[RankEnd]:
        """How each rank stands, before the elastic agent reacts to any of them."""
        processes = self._processes()
        ends = []
        for worker in worker_group.workers:
            path = self._failure_folder / f"rank-{worker.global_rank}.json"
            exit_code = processes[worker.local_rank].poll()
            if exit_code is None:
                exit_code = read_announced_end(path)
            ends.append(RankEnd(worker.global_rank, exit_code, read_report(path)))
        return ends

    def _processes(self) -> dict[int, Popen[bytes]]:
        if not isinstance(self._pcontext, SubprocessContext):
            return {}  # nothing has been started yet
        return {local_rank: handler.proc for local_rank, handler in self._pcontext.subprocess_handlers.items()}


def _send(processes: Sequence[Popen[bytes]], number: signal.Signals) -> None:
    """To each process and all it started: every rank leads a group of its own."""
    for process in processes:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def _less_our_own_signal(end: RankEnd) -> RankEnd:
    """Seen after the elastic agent has stopped the ranks: one that ended by its signal was running until then."""
    return replace(end, exit_code=None) if end.exit_code == -signal.SIGTERM else end


def _rendezvous(node: Node, endpoint: str | None) -> RendezvousHandler:
    if endpoint is None:
        return FreshStoreRendezvous(node)
    parameters = RendezvousParameters("c10d", endpoint, run_id="lockstep", min_nodes=node.count, max_nodes=node.count)
    return get_rendezvous_handler(parameters)


def _for_workers(node: Node, failure_folder: str) -> dict[str, str]:
    variables = {
        environment.AGENT_PID: str(os.getpid()),
        environment.FAILURE_FOLDER: failure_folder,
        # A constant, never cores / processes: the number of threads changes the bits of a sum.
        "OMP_NUM_THREADS": str(environment.threads_per_process()),
    }
    if is_loopback(node.master_addr):
        variables |= environment.pin_to_loopback(loopback_interface())
    return variables


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """The elastic agent's own log repeats what our verdict says better."""
    elastic = logging.getLogger("torch.distributed.elastic")
    silence = logging.NullHandler()
    elastic.addHandler(silence)
    elastic.propagate = False
    try:
        yield
    finally:
        elastic.propagate = True
        elastic.removeHandler(silence)


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """The elastic agent installs handlers for good; a script that called `launch` wants its own back."""
    names = [name for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
