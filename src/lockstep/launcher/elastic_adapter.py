"""Adapter to torch's elastic agent: the only file that uses its private names.

[Note: elastic names]

Torch's elastic agent brings the agents of all machines together, assigns ranks and runs the loop of start, monitor and
restart. `ElasticAgentAdapter` leaves that to it and asks its subclass about the ranks themselves, through methods with
public names. For this it overrides private methods of `SimpleElasticAgent`, which torch documents for subclasses but
may change: `_rendezvous`, `_start_workers`, `_monitor_workers`, `_stop_workers`, `_shutdown`. To decide about a restart
it sets `_remaining_restarts`, which has no public counterpart; and it replaces `_create_tcp_store_server` of torch's
c10d rendezvous, which listens on every interface. Checked with torch 2.11 and 2.13; between these,
`_shutdown` gained an argument, `timeout`. If a name is gone, the launch ends with a one-line error;
`tests/contracts/test_private_names_elastic.py` finds it earlier.
"""

import inspect
import logging
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from lockstep.config.placement import HOSTED_STORE_VARIABLE, STORE_PORT_VARIABLE
from lockstep.config.tested_versions import TESTED_TORCH
from lockstep.errors import UserError
from lockstep.supervision.stop_signals import is_importing

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # the stubs of torch.distributed lack it
else:
    from torch.distributed import Store

_AGENT_STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)
]
# The private methods that are overridden, with their first argument.
_OVERRIDDEN = {
    "_rendezvous": "worker_group",
    "_start_workers": "worker_group",
    "_monitor_workers": "worker_group",
    "_stop_workers": "worker_group",
    "_shutdown": "death_sig",
}
_RESTART_COUNTER = "_remaining_restarts"
STORE_SERVER_METHOD = "_create_tcp_store_server"


class RanksState(Enum):
    """The result of polling this machine's ranks."""

    RUNNING = WorkerState.HEALTHY
    SUCCEEDED = WorkerState.SUCCEEDED
    FAILED = WorkerState.FAILED  # torch's agent restarts all ranks, or ends: see `allow_restart`


class ElasticAgentAdapter(SimpleElasticAgent, ABC):
    """Torch's elastic agent, with public names for what a subclass must provide. Run it with `run()`."""

    def __init__(self, num_ranks: int, rendezvous: RendezvousHandler, max_restarts: int) -> None:
        check_elastic_names()
        self.stop_signals = AgentStopSignals()
        super().__init__(
            WorkerSpec(
                role="default",
                local_world_size=num_ranks,
                entrypoint="lockstep",
                rdzv_handler=rendezvous,
                max_restarts=max_restarts,
                monitor_interval=0.001,  # `poll_ranks` itself waits
            )
        )

    @abstractmethod
    def start_ranks(self, ranks: Sequence[int], variables: Sequence[Mapping[str, str]]) -> list[int]:
        """Start this machine's ranks, each with its environment variables; return their process ids."""

    @abstractmethod
    def poll_ranks(self) -> RanksState:
        """Wait a moment, then check on the ranks."""

    @abstractmethod
    def stop_on_request(self, number: signal.Signals) -> None:
        """Handle a stop signal: let the ranks end by themselves. `end_ranks` follows."""

    @abstractmethod
    def end_ranks(self) -> None:
        """Kill the ranks that are still running."""

    @abstractmethod
    def on_job_ended_elsewhere(self, reason: str) -> None:
        """Handle the end of the job by another machine."""

    @abstractmethod
    def restart_count(self) -> int:
        """Return the number of restarts so far, for the ranks' TORCHELASTIC_RESTART_COUNT."""

    def allow_restart(self, is_allowed: bool) -> None:
        """Decide what happens after `poll_ranks` returns FAILED: restart all ranks, or end."""
        setattr(self, _RESTART_COUNTER, int(is_allowed))

    @property
    def num_local_ranks(self) -> int:
        """How many ranks this machine has from the next start on."""
        return self.get_worker_group().spec.local_world_size

    def remove_one_rank(self) -> None:
        """Start one rank fewer on this machine from the next start on."""
        self.get_worker_group().spec.local_world_size -= 1

    @property
    def world_size(self) -> int:
        """How many ranks the job has."""
        size: int = self.get_worker_group().workers[0].world_size
        return size

    @property
    def rendezvous_handler(self) -> RendezvousHandler:
        """Where the agents of the job meet."""
        return self.get_worker_group().spec.rdzv_handler

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        try:
            super()._rendezvous(worker_group)
        except RendezvousGracefulExitError as error:
            self.on_job_ended_elsewhere(str(error))
            raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ranks = [worker.global_rank for worker in worker_group.workers]
        variables = [self._variables(worker_group, worker) for worker in worker_group.workers]
        with self.stop_signals.held():
            return dict(enumerate(self.start_ranks(ranks, variables)))

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        with self.stop_signals.held():
            state = self.poll_ranks().value
        results = {worker.global_rank: None for worker in worker_group.workers}
        return RunResult(state, results if state == WorkerState.SUCCEEDED else {})

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        with self.stop_signals.held():
            self.end_ranks()

    def _shutdown(self, death_sig: signal.Signals | None = None, *_: Any, **__: Any) -> None:
        """Handle the end of the run: torch calls this every time, with a signal only after a stop request."""
        if death_sig is not None:
            self.stop_on_request(death_sig)
        self.end_ranks()

    def _variables(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        """Return what torchrun sets for a worker, by the same names, and once more the store's port."""
        spec, handler = group.spec, group.spec.rdzv_handler
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(group.group_rank),
            "GROUP_WORLD_SIZE": str(group.group_world_size),
            "ROLE_NAME": spec.role,
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.restart_count()),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": handler.get_run_id(),
            HOSTED_STORE_VARIABLE: str(handler.use_agent_store),
            STORE_PORT_VARIABLE: str(group.master_port),
        }


def check_elastic_names(agent: type = SimpleElasticAgent) -> None:
    """Raise a `UserError` if torch's elastic agent lacks a name that `ElasticAgentAdapter` relies on."""
    missing = [name for name, argument in _OVERRIDDEN.items() if _first_argument(agent, name) != argument]
    if _RESTART_COUNTER not in _attributes_used_by(agent):
        missing.append(_RESTART_COUNTER)
    if missing:
        raise UserError(
            f"torch {torch.__version__}: its elastic agent, through which lockstep starts several processes, has lost "
            f"or changed {', '.join(missing)}: install {TESTED_TORCH}, or omit -n (nproc)"
        )


def replace_store_server(rendezvous: RendezvousHandler, host: Callable[[str, int], Store]) -> None:
    """Let a c10d rendezvous host the ranks' store by this function, if this torch lets it host one."""
    if hasattr(rendezvous, STORE_SERVER_METHOD):
        setattr(rendezvous, STORE_SERVER_METHOD, host)


def _first_argument(agent: type, method: str) -> str | None:
    function = getattr(agent, method, None)
    arguments = [] if function is None else list(inspect.signature(function).parameters)
    return arguments[1] if len(arguments) > 1 else None


def _attributes_used_by(agent: type) -> set[str]:
    """Return the names that the class's `_invoke_run`, the loop of its agent, uses."""
    code = getattr(getattr(agent, "_invoke_run", None), "__code__", None)
    return set() if code is None else set(code.co_names)


@contextmanager
def quiet_elastic_log() -> Iterator[None]:
    """Silence the elastic agent's own log, which repeats less clearly what our verdict says."""
    elastic = logging.getLogger("torch.distributed.elastic")
    silence = logging.NullHandler()
    elastic.addHandler(silence)
    elastic.propagate = False
    try:
        yield
    finally:
        elastic.propagate = True
        elastic.removeHandler(silence)


class AgentStopSignals:
    """The stop signals of an agent: the first one raises torch's `SignalException`, which its agent expects.

    Not inside `held`, but right after it: our own code must not be left in the middle. A signal during an import raises
    at the end of the next `held`. [Note: held signals]
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._has_raised = False
        self._num_holds = 0

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the stop signals within the block, except for those that are ignored."""
        before = {number: signal.getsignal(number) for number in _AGENT_STOP_SIGNALS}
        handle_stop_signals(self._on_stop_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, handler)

    def ignore(self) -> None:
        """Ignore stop signals from now on, as `supervision.stop_signals.ignore_stop_signals` does."""
        handle_stop_signals(signal.SIG_IGN)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let a signal within the block raise at its end."""
        self._num_holds += 1
        try:
            yield
        finally:
            self._num_holds -= 1
            self._obey()

    def _on_stop_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:  # a second exception would end the ranks before they were asked to
            self._received = number
            if not is_importing(frame):
                self._obey()

    def _obey(self) -> None:
        if self._received is not None and not self._has_raised and self._num_holds == 0:
            self._has_raised = True
            raise SignalException(f"stopped by signal {self._received}", sigval=signal.Signals(self._received))


def handle_stop_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> None:
    """Install a handler for the agent's stop signals, except for those that are ignored."""
    for number in _AGENT_STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and shells' background jobs ignore some
            signal.signal(number, handler)
