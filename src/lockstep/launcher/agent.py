"""The agent of one machine: torch's elastic agent, with our store, our processes and our words for what happens."""

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lockstep.config import environment
from lockstep.config.placement import AGENT_PID, Node, is_loopback
from lockstep.errors import EXIT_FAILED, EXIT_STOPPED
from lockstep.launcher.agent_folder import agent_folder, clear
from lockstep.launcher.attempt import Attempt
from lockstep.launcher.plan import Supervision
from lockstep.launcher.processes import Processes, StartFailed
from lockstep.launcher.rendezvous import FreshStoreRendezvous
from lockstep.launcher.restarts import Decision, Restarts
from lockstep.launcher.store import await_name, interface_towards
from lockstep.supervision.failure import (
    Scene,
    Verdict,
    explain,
)
from lockstep.supervision.hang import Hang
from lockstep.supervision.incidents import keep_incident
from lockstep.supervision.memory import OutOfMemoryKills
from lockstep.supervision.pulse import COMPILER, LOOP_PHASES
from lockstep.supervision.watch import Watch

_POLL_INTERVAL_S = 0.1
_ONE_REQUEST_S = 0.2  # `timeout`, a scheduler or a wrapper may send the same signal twice
_LAST_WORDS_S = 5.0  # of the grace period
_KNOWN_WITHIN_S = 60.0  # machine 0, by its name

_STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name)]


def count_devices() -> int:
    """How many processes `-n auto` means: one per GPU, or one per core that this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_agent(
    processes: Processes, nproc: int, node: Node, supervision: Supervision, *, rdzv_endpoint: str | None = None
) -> int:
    """Run the processes' target on `nproc` of them until all are done or no restart helps; return the exit code."""
    if node.count > 1:
        await_name(node.master_addr, _KNOWN_WITHIN_S)
    with agent_folder() as folder:
        spec = WorkerSpec(
            role="default",
            local_world_size=nproc,
            entrypoint="lockstep",
            rdzv_handler=_rendezvous(node, rdzv_endpoint),
            max_restarts=supervision.max_restarts,
            monitor_interval=0.001,  # `_monitor_workers` itself waits
        )
        agent = _Agent(spec, processes, folder, supervision)
        with _quiet_elastic(), _stop_signals_raise(), environment.exported(_for_workers(node, folder)):
            try:
                result = agent.run()
            except SignalException as stop:
                agent.say(agent.stop_words or f"stopped on request ({stop.sigval.name})")
                return EXIT_STOPPED
    if result is None or result.is_failed():
        return agent.verdict.exit_code if agent.verdict else EXIT_FAILED  # another machine has ended the job
    return 0


class _Agent(SimpleElasticAgent):
    """Sees each rank's end as it happens, tells the cause from its victims, and decides about restarts itself."""

    def __init__(self, spec: WorkerSpec, processes: Processes, folder: Path, supervision: Supervision) -> None:
        super().__init__(spec)
        self.verdict: Verdict | None = None
        self.stop_words = ""  # of a rank that stopped on request
        self._processes = processes
        self._folder = folder
        self._supervision = supervision
        self._restarts = Restarts(supervision.max_restarts)
        self._memory_kills = OutOfMemoryKills()
        self._attempt = Attempt(folder, processes, [])
        self._watch: Watch | None = None
        if supervision.hang_limit_s is not None:  # it outlives the attempt, and so asks for the one that is running
            files, reading = (lambda rank: self._attempt.files(rank)), (lambda rank: self._attempt.reading(rank))
            self._watch = Watch(supervision.hang_limit_s, files, reading)

    def say(self, text: str) -> None:
        with suppress(OSError, ValueError):  # Ctrl-C ends a `| tee` as well: the ranks are saved all the same
            print(f"lockstep: {text}", file=sys.stderr, flush=True)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        try:
            super()._rendezvous(worker_group)
        except RendezvousGracefulExitError as error:
            self.say(str(error))
            raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._memory_kills = OutOfMemoryKills()
        clear(self._folder)
        self._attempt = Attempt(self._folder, self._processes, [worker.global_rank for worker in worker_group.workers])
        try:
            ranks = self._processes.start([self._variables(worker_group, worker) for worker in worker_group.workers])
        except StartFailed:
            self._tell_other_machines()
            raise
        if self._watch is not None:
            self._watch.begin()
        return {local_rank: rank.pid for local_rank, rank in enumerate(ranks)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:  # noqa: ARG002  (torch's signature)
        self._processes.look(_POLL_INTERVAL_S)
        ends = self._attempt.ends()
        if all(end.exit_code == 0 for end in ends) and not any(rank.is_running for rank in self._processes.ranks):
            self._tell_other_machines()  # where a rank failed last of all, they would wait for us to restart it
            return RunResult(WorkerState.SUCCEEDED, {end.rank: None for end in ends})
        if any(rank.exit_code for rank in self._processes.ranks):
            self._conclude(explain(self._attempt.await_the_cause(), self._scene()))
            return RunResult(WorkerState.FAILED)
        if self._watch is not None:
            hang = self._watch.look(self._attempt.now(ends), self._scene)
            if hang is not None and any(end.exit_code for end in ends):
                # It has failed, and said of what; a thread or a handler of its own keeps its process from ending.
                self._conclude(explain(ends, self._scene()))
                return RunResult(WorkerState.FAILED)
            if hang is not None and self._end_the_hang(hang):
                return RunResult(WorkerState.FAILED)
        if any(end.pulse is not None and end.pulse.has_compiler for end in ends):
            self._processes.import_ahead(COMPILER)
        return RunResult(WorkerState.HEALTHY)

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        self._processes.end()

    def _shutdown(self, death_sig: signal.Signals | None = None, *_: Any, **__: Any) -> None:
        """Torch calls it at the end, whatever the end is; with a signal after a stop request alone.

        The other arguments are what this torch's agent passes itself: 2.13 a timeout, 2.11 nothing.
        """
        if death_sig is not None:
            self._stop_on_request(death_sig)
        self._processes.end()

    def _stop_on_request(self, number: signal.Signals) -> None:
        """Ask the ranks to end, and wait for them; one more signal kills them at once."""
        running = [rank for rank in self._processes.ranks if rank.is_running]
        if not running:
            return
        is_urgent = False

        def hurry(*_: object) -> None:
            nonlocal is_urgent
            is_urgent = True

        _handle_stop_signals(hurry)
        asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM  # a terminal that closes ends nothing else
        for rank in running:
            rank.send(asked)
        time.sleep(_ONE_REQUEST_S)
        is_urgent = False
        # Said only now: who reads it may take us at our word at once.
        self.say(f"stopping {len(running)} ranks ({number.name}); once more to kill them at once")
        asked_at = time.monotonic()
        is_plain = number != signal.SIGINT
        grace_s = self._supervision.grace_s
        while not is_urgent and not self._processes.await_ends(_POLL_INTERVAL_S):
            waited_s = time.monotonic() - asked_at
            if waited_s > grace_s:
                self.say(f"not all ranks have ended within {grace_s:g} s: killing them (--grace)")
                break
            if not is_plain and waited_s > grace_s - min(_LAST_WORDS_S, grace_s / 2):
                # Python may lose an interrupt, in an import for one: who did not hear it is asked in plainer words.
                # Not sooner: a script that saves itself on Ctrl-C would be killed by them.
                is_plain = True
                for rank, reading in zip(self._processes.ranks, self._attempt.readings().values(), strict=True):
                    if reading is None or not reading.is_stopping:
                        rank.send(signal.SIGTERM)
        for end in self._attempt.ends():
            if end.report is not None and end.report.exit_code == EXIT_STOPPED:
                self.stop_words = end.report.error.partition(": ")[2]

    def _end_the_hang(self, hang: Hang) -> bool:
        """As configured; False: it was only to be told."""
        readings = self._attempt.readings().values()
        is_in_a_loop = any(reading is not None and reading.phase in LOOP_PHASES for reading in readings)
        is_in_a_run = is_in_a_loop or self._attempt.run_folder() is not None
        action = self._supervision.on_hang or ("restart" if is_in_a_run else "stop")
        if action == "report":
            self._tell(hang.verdict)
            self._keep_incident("hang", hang.verdict, hang.facts)
            return False
        self._conclude(hang.verdict, "hang", hang.facts, may_restart=action == "restart")
        return True

    def _tell(self, verdict: Verdict) -> None:
        for message in verdict.messages:
            self.say(message)

    def _conclude(
        self, verdict: Verdict, kind: str = "crash", facts: Mapping[str, Any] | None = None, *, may_restart: bool = True
    ) -> None:
        """Say what happened, keep it, and decide whether to go on; the elastic agent does as the count tells it."""
        self.verdict = verdict
        self._tell(verdict)
        decision = Decision(False, "")
        if may_restart:
            decision = self._restarts.decide(verdict, self._attempt.step, can_change=self._can_shrink)
        if not verdict.is_final:
            self._keep_incident(kind, verdict, facts or {})
        if decision.why:
            self.say(decision.why)
        if decision.goes_on and self._restarts.is_stuck and self._can_shrink:
            spec = self._worker_group.spec
            spec.local_world_size -= 1
            self.say(f"with {spec.local_world_size} processes on this machine: a restart with more did not help")
        self._remaining_restarts = int(decision.goes_on)
        if not decision.goes_on:
            self._tell_other_machines()

    def _tell_other_machines(self) -> None:
        """That this one will not come again."""
        if isinstance(self._worker_group.spec.rdzv_handler, FreshStoreRendezvous):
            self._worker_group.spec.rdzv_handler.tell_end()

    @property
    def _can_shrink(self) -> bool:
        least = self._supervision.min_nproc
        return least is not None and self._worker_group.spec.local_world_size > least

    def _keep_incident(self, kind: str, verdict: Verdict, more: Mapping[str, Any]) -> None:
        run_folder = self._attempt.run_folder()
        folder = self._supervision.incidents if run_folder is None else run_folder / "incidents"
        if folder is None:
            return
        places = {
            str(rank): None if reading is None else {"step": reading.step, "phase": reading.phase.name.lower()}
            for rank, reading in self._attempt.readings().items()
        }
        facts = {
            "rank": verdict.rank,
            "host": socket.gethostname(),
            "cause": verdict.cause,
            "victims": list(verdict.victims),
            "world_size": self._worker_group.workers[0].world_size,
            "attempt": self._restarts.num_made,
            "ranks": places,
            **more,
        }
        try:
            path = keep_incident(folder, kind, "\n".join(verdict.messages), facts)
        except OSError as error:
            self.say(f"the report could not be kept in {folder}: {error.strerror or error}")
        else:
            self.say(f"the report is in {path}")

    def _scene(self) -> Scene:
        return Scene(self._worker_group.workers[0].world_size, socket.gethostname(), self._memory_kills.any_since())

    def _variables(self, worker_group: WorkerGroup, worker: Any) -> dict[str, str]:
        """What torchrun sets for a worker, by the same names."""
        spec = worker_group.spec
        handler = spec.rdzv_handler
        num_restarts = handler.num_restarts if isinstance(handler, FreshStoreRendezvous) else self._restarts.num_made
        restarted = {} if self.verdict is None else {environment.RESTARTED_AFTER: self.verdict.cause}
        return restarted | {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "GROUP_RANK": str(worker_group.group_rank),
            "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
            "ROLE_NAME": spec.role,
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "MASTER_ADDR": str(worker_group.master_addr),
            "MASTER_PORT": str(worker_group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(num_restarts),
            "TORCHELASTIC_MAX_RESTARTS": str(self._supervision.max_restarts),
            "TORCHELASTIC_RUN_ID": handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": str(handler.use_agent_store),
        }


def _rendezvous(node: Node, endpoint: str | None) -> RendezvousHandler:
    if endpoint is None:
        return FreshStoreRendezvous(node)
    parameters = RendezvousParameters("c10d", endpoint, run_id="lockstep", min_nodes=node.count, max_nodes=node.count)
    return get_rendezvous_handler(parameters)


def _for_workers(node: Node, folder: Path) -> dict[str, str]:
    variables = {
        AGENT_PID: str(os.getpid()),
        environment.SUPERVISION_FOLDER: str(folder),
        # A constant, never cores / processes: the number of threads changes the bits of a sum.
        "OMP_NUM_THREADS": str(environment.threads_per_process()),
    }
    interface = interface_towards(node.master_addr)
    return variables | environment.pin_to(interface, one_machine=is_loopback(node.master_addr))


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
def _stop_signals_raise() -> Iterator[None]:
    """As the elastic agent expects it; a script that called `launch` gets its own handlers back."""

    def stop(number: int, _frame: object) -> NoReturn:
        _handle_stop_signals(lambda *_: None)  # raised once more, it would end the ranks before they were asked to
        raise SignalException(f"stopped by signal {number}", sigval=signal.Signals(number))

    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    _handle_stop_signals(stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handle_stop_signals(handler: Callable[[int, Any], Any]) -> None:
    for number in _STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells' background jobs want it
            signal.signal(number, handler)
