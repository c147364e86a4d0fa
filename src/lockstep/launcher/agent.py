"""The agent of one machine: starts its ranks, watches them, explains failures and hangs, and restarts.

Built on torch's elastic agent: see `elastic_adapter`. `rank_monitor` reads the state of the ranks.
"""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler

from lockstep.config import environment
from lockstep.config.placement import (
    AGENT_PID_VARIABLE,
    STORE_FILE_VARIABLE,
    STORE_PREFIX_VARIABLE,
    MachineNode,
    is_loopback,
)
from lockstep.config.plurals import count_noun
from lockstep.errors import EXIT_FAILED, EXIT_STOPPED
from lockstep.launcher.elastic_adapter import (
    ElasticAgentAdapter,
    RanksState,
    handle_stop_signals,
    quiet_elastic_log,
)
from lockstep.launcher.launch_plan import SupervisionOptions
from lockstep.launcher.rank_monitor import RankMonitor
from lockstep.launcher.rank_processes import RankProcesses, RankStartError
from lockstep.launcher.rendezvous import FreshStoreRendezvous, c10d_rendezvous
from lockstep.launcher.restart_policy import RestartDecision, RestartPolicy
from lockstep.launcher.stop_outcome import StopOutcome, judge_stop
from lockstep.launcher.tcp_store import interface_towards, wait_for_hostname
from lockstep.supervision.agent_folder import agent_folder, clear_rank_files
from lockstep.supervision.collective_mismatch import find_deviation
from lockstep.supervision.failure_report import (
    FailureContext,
    FailureVerdict,
    RankExit,
    aborted_rank,
    explain_failure,
    write_incident,
)
from lockstep.supervision.hang_detector import HangDetector
from lockstep.supervision.hang_report import HangReport
from lockstep.supervision.heartbeat import COMPILER, LOOP_PHASES, Phase
from lockstep.supervision.linux_processes import OutOfMemoryKills, available_cores
from lockstep.supervision.stop_signals import obey_stop_request
from lockstep.terminal_text import print_line

_POLL_INTERVAL_S = 0.1
_SAME_REQUEST_S = 0.2  # a repeat within this time is the same request: `timeout` or a scheduler may signal twice
_TERMINATE_BEFORE_END_S = 5.0  # of the grace period
_RESOLVE_WITHIN_S = 60.0  # for machine 0's hostname


def count_devices() -> int:
    """Return the number of processes for `-n auto`: one per GPU, or one per core that this process may use."""
    if torch.cuda.is_available():
        return torch.cuda.device_count()
    return available_cores()


def run_agent(
    processes: RankProcesses,
    nproc: int,
    node: MachineNode,
    options: SupervisionOptions,
    *,
    rdzv_endpoint: str | None = None,
) -> int:
    """Run the target until all ranks are done or no restart helps; return the exit code.

    Args:
        processes: the processes of this machine's ranks, not yet started.
        nproc: how many of them to start.
        node: this machine's place in the job.
        options: what to do about failures, hangs and stop requests.
        rdzv_endpoint: the endpoint of torch's c10d rendezvous; None: the machines meet at machine 0.
    """
    if node.count > 1:
        wait_for_hostname(node.master_addr, _RESOLVE_WITHIN_S)
    obey_stop_request()  # from here on, the agent handles stop signals
    with agent_folder() as folder:
        agent = Agent(processes, nproc, _rendezvous_handler(node, rdzv_endpoint), folder, options)
        with (
            quiet_elastic_log(),
            agent.stop_signals.handled(),
            environment.temporary_variables(_variables_for_all_ranks(node, folder)),
        ):
            try:
                result = agent.run()
            except SignalException as stop:
                outcome = agent.judge_stop(stop.sigval)
                if outcome.exit_code == EXIT_STOPPED:
                    agent.stop_signals.ignore()
                agent.say(outcome.message)
                return outcome.exit_code
    if result is None or result.is_failed():
        return agent.verdict.exit_code if agent.verdict else EXIT_FAILED  # None: another machine ended the job
    return 0


class Agent(ElasticAgentAdapter):
    """Notices when ranks end, tells the cause of a failure from its victims, and decides whether to restart."""

    def __init__(
        self,
        processes: RankProcesses,
        nproc: int,
        rendezvous: RendezvousHandler,
        folder: Path,
        options: SupervisionOptions,
    ) -> None:
        super().__init__(nproc, rendezvous, options.max_restarts)
        self.verdict: FailureVerdict | None = None  # on the last failure
        self._processes = processes
        self._folder = folder
        self._options = options
        self._restart_policy = RestartPolicy(options.max_restarts)
        self._memory_kills = OutOfMemoryKills()
        self._monitor = RankMonitor(folder, processes, [])
        self._exits_after_request: Sequence[RankExit] = ()
        self._hang_detector: HangDetector | None = None
        if options.hang_limit_s is not None:
            self._hang_detector = HangDetector(
                options.hang_limit_s,
                # Not bound methods: the detector outlives the attempt, and each attempt has a new monitor.
                lambda rank: self._monitor.files(rank),
                lambda rank: self._monitor.heartbeat(rank),
                stop_limit_s=None if options.on_hang == "report" else options.hang_stop_s,
            )

    def say(self, text: str) -> None:
        """Print a line to standard error."""
        with suppress(OSError, ValueError):  # a script may have put a stream of its own there
            print_line(f"lockstep: {text}", file=sys.stderr, flush=True)

    def start_ranks(self, ranks: Sequence[int], variables: Sequence[Mapping[str, str]]) -> list[int]:
        """Start the ranks of a new attempt."""
        self._memory_kills = OutOfMemoryKills()
        clear_rank_files(self._folder)
        self._monitor = RankMonitor(self._folder, self._processes, ranks)
        common = self._store_variables()
        if self.verdict is not None:
            common[environment.RESTARTED_AFTER_VARIABLE] = self.verdict.cause
        try:
            started = self._processes.start([common | dict(each) for each in variables])
        except RankStartError:
            self._tell_other_machines()
            raise
        if self._hang_detector is not None:
            self._hang_detector.begin()
        return [process.pid for process in started]

    def poll_ranks(self) -> RanksState:
        """Wait for up to a tenth of a second, then look for ranks that have ended or hang."""
        self._processes.poll(_POLL_INTERVAL_S)
        if self._monitor.have_all_succeeded():
            self._tell_other_machines()  # if a rank there fails at its very end, they must not wait for us to restart
            return RanksState.SUCCEEDED
        if self._monitor.has_dead_rank():
            exits = self._monitor.wait_for_cause()
            collectives = self._monitor.last_collectives(exits) if aborted_rank(exits) is not None else {}
            self._conclude(explain_failure(exits, self._context(), find_deviation(collectives)))
            return RanksState.FAILED
        exits = self._monitor.exits()
        if self._hang_detector is not None:
            hang = self._hang_detector.poll(self._monitor.statuses(exits), self._context)
            if hang is not None and any(each.exit_code for each in exits):
                # The hung rank has failed and reported its error, but a thread or a handler keeps its process alive.
                self._conclude(explain_failure(exits, self._context()))
                return RanksState.FAILED
            if hang is not None and self._end_hang(hang):
                return RanksState.FAILED
        if any(each.heartbeat is not None and each.heartbeat.has_compiler for each in exits):
            self._processes.import_ahead(COMPILER)
        return RanksState.RUNNING

    def end_ranks(self) -> None:
        """Kill the ranks that are still running."""
        self._processes.end()

    def stop_on_request(self, number: signal.Signals) -> None:
        """Ask the ranks to stop, and wait for them; another signal kills them at once."""
        running = [rank for rank in self._processes.ranks if rank.is_running]
        if not running:
            return
        is_urgent = False

        def on_another_signal(*_: object) -> None:
            nonlocal is_urgent
            is_urgent = True

        handle_stop_signals(on_another_signal)
        # Scripts expect SIGTERM: few handle SIGHUP, and SIGQUIT would dump core.
        asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        for rank in running:
            rank.send(asked)
        time.sleep(_SAME_REQUEST_S)
        is_urgent = False
        # Printed only now: whoever reads it may send the next signal at once.
        them = "it" if len(running) == 1 else "them"
        self.say(f"stopping {count_noun(len(running), 'rank')} ({number.name}); signal again to kill {them} at once")
        asked_at = time.monotonic()
        is_terminated = asked == signal.SIGTERM
        grace_s = self._options.grace_s
        while not is_urgent and not self._processes.wait_for_ends(_POLL_INTERVAL_S):
            waited_s = time.monotonic() - asked_at
            if waited_s > grace_s:
                self.say(f"not all ranks ended within {grace_s:g} s (--grace): killing them")
                break
            if self._waits_for_ended_rank():
                break
            if not is_terminated and waited_s > grace_s - min(_TERMINATE_BEFORE_END_S, grace_s / 2):
                is_terminated = True
                self._terminate_ranks_that_missed_the_interrupt()
        self._exits_after_request = self._monitor.exits()

    def _waits_for_ended_rank(self) -> bool:
        """Are all ranks that run still joining a job that one has left? Torch's wait for it ignores signals."""
        exits = self._monitor.exits()
        running = [end.heartbeat for end in exits if end.exit_code is None]
        is_joining = all(each is None or each.phase in (Phase.STARTING, Phase.JOINING) for each in running)
        return is_joining and len(running) < len(exits)

    def judge_stop(self, number: signal.Signals) -> StopOutcome:
        """Say how the job ended that this signal has stopped."""
        return judge_stop(number, self._exits_after_request, self._monitor.run_folder())

    def _terminate_ranks_that_missed_the_interrupt(self) -> None:
        """Send SIGTERM to ranks that have not reacted to SIGINT: Python may lose one, during an import for example.

        Not done sooner: it would kill a script that is saving its state on Ctrl-C.
        """
        heartbeats = self._monitor.heartbeats().values()
        for rank, heartbeat in zip(self._processes.ranks, heartbeats, strict=True):
            if heartbeat is None or not heartbeat.is_stopping:
                rank.send(signal.SIGTERM)

    def on_job_ended_elsewhere(self, reason: str) -> None:
        """Print why another machine ended the job."""
        self.say(reason)

    def restart_count(self) -> int:
        """Return how often the job was restarted; with torch's own rendezvous, how often this machine was."""
        handler = self.rendezvous_handler
        return handler.num_restarts if isinstance(handler, FreshStoreRendezvous) else self._restart_policy.num_made

    def _end_hang(self, hang: HangReport) -> bool:
        """Handle a hang as configured; return False if it was only reported, as one that may be none always is."""
        heartbeats = self._monitor.heartbeats().values()
        is_in_loop = any(each is not None and each.phase in LOOP_PHASES for each in heartbeats)
        can_resume = is_in_loop or self._monitor.run_folder() is not None
        action = self._options.on_hang or ("restart" if can_resume else "stop")
        if action == "report" or not hang.must_end:
            self._print(hang.verdict)
            self._write_incident("hang", hang.verdict, hang.facts)
            return False
        self._conclude(hang.verdict, "hang", hang.facts, may_restart=action == "restart")
        return True

    def _print(self, verdict: FailureVerdict) -> None:
        for message in verdict.messages:
            self.say(message)

    def _conclude(
        self,
        verdict: FailureVerdict,
        kind: str = "crash",
        facts: Mapping[str, Any] | None = None,
        *,
        may_restart: bool = True,
    ) -> None:
        """Print and keep the verdict, and decide whether to restart."""
        self.verdict = verdict
        self._print(verdict)
        decision = RestartDecision(False, "")
        if may_restart:
            decision = self._restart_policy.decide(verdict, self._monitor.step, can_change=self._can_shrink)
        if not verdict.is_final:
            self._write_incident(kind, verdict, facts or {})
        if decision.why:
            self.say(decision.why)
        if decision.is_restart and self._restart_policy.is_stuck and self._can_shrink:
            self.remove_one_rank()
            processes = count_noun(self.num_local_ranks, "process")
            self.say(f"continuing with {processes} on this machine: a restart with more did not help")
        self.allow_restart(decision.is_restart)
        if not decision.is_restart:
            self._tell_other_machines()

    def _store_variables(self) -> dict[str, str]:
        variables = {STORE_FILE_VARIABLE: "", STORE_PREFIX_VARIABLE: ""}  # not those of a job that started this one
        handler = self.rendezvous_handler
        if isinstance(handler, FreshStoreRendezvous):
            variables |= handler.store_variables(self._folder)
        return variables

    def _tell_other_machines(self) -> None:
        """Tell the agents of the other machines that this one will not join another rendezvous."""
        handler = self.rendezvous_handler
        if isinstance(handler, FreshStoreRendezvous):
            handler.announce_end()

    @property
    def _can_shrink(self) -> bool:
        min_nproc = self._options.min_nproc
        return min_nproc is not None and self.num_local_ranks > min_nproc

    def _write_incident(self, kind: str, verdict: FailureVerdict, more: Mapping[str, Any]) -> None:
        run_folder = self._monitor.run_folder()
        folder = self._options.incidents if run_folder is None else run_folder / "incidents"
        if folder is None:
            return
        places = {
            str(rank): None if each is None else {"step": each.step, "phase": each.phase.name.lower()}
            for rank, each in self._monitor.heartbeats().items()
        }
        facts = {
            "rank": verdict.rank,
            "host": socket.gethostname(),
            "cause": verdict.cause,
            "victims": list(verdict.victims),
            "world_size": self.world_size,
            "attempt": self._restart_policy.num_made,
            "ranks": places,
            **more,
        }
        try:
            path = write_incident(folder, kind, "\n".join(verdict.messages), facts)
        except OSError as error:
            self.say(f"could not write the report to {folder}: {error.strerror or error}")
        else:
            self.say(f"the report is in {path}")

    def _context(self) -> FailureContext:
        return FailureContext(self.world_size, socket.gethostname(), self._memory_kills.any_since())


def _rendezvous_handler(node: MachineNode, endpoint: str | None) -> RendezvousHandler:
    if endpoint is None:
        return FreshStoreRendezvous(node)
    return c10d_rendezvous(node.count, endpoint)


def _variables_for_all_ranks(node: MachineNode, folder: Path) -> dict[str, str]:
    variables = {
        AGENT_PID_VARIABLE: str(os.getpid()),
        environment.SUPERVISION_FOLDER_VARIABLE: str(folder),
        # A constant, never cores / processes: the number of threads changes the bits of a sum.
        "OMP_NUM_THREADS": str(environment.threads_per_process()),
    }
    interface = interface_towards(node.master_addr)
    return variables | environment.interface_variables(interface, one_machine=is_loopback(node.master_addr))
