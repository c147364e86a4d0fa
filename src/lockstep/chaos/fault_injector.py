"""Carry out a fault plan: train one config, inject faults until all kills are made, and check each run at its end.

A run that ends before the last fault is checked, and the next round begins in a new folder. When the launcher was
killed, or has given up, it is started again on the number of processes in the plan: that resizes the job.
"""

import json
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.chaos.chaos_checks import (
    ChaosCheck,
    check_audit,
    check_run,
    check_saved,
    num_attempts,
    num_steps_made,
    read_end,
)
from lockstep.chaos.fault_plan import PlannedFault
from lockstep.chaos.job_processes import LeftoverCheck, MarkedProcesses
from lockstep.chaos.launched_job import (
    FaultTarget,
    JobProgress,
    LaunchedJob,
    ProgressWatcher,
    has_recovered,
    is_training,
)
from lockstep.config import environment
from lockstep.events.run_folder import RunFolder
from lockstep.supervision.failure_report import describe_place
from lockstep.supervision.heartbeat import Heartbeat, Phase

_POLL_S = 0.002
_MOMENT_TIMEOUT_S = 20.0  # for a moment that may not come; after that the fault is injected anyway
_STUCK_S = 120.0
_UNLIMITED_RESTARTS = "1000000"
_MAX_LOG_CHARS = 2000


class InjectedFault(NamedTuple):
    """A fault as it happened: a line of attacks.jsonl."""

    t: float
    number: int
    round: int
    launch: int
    processes: int
    victim: str
    pid: int
    act: str
    moment: str  # as planned
    phase: str | None  # as observed
    step: int | None
    is_saving: bool  # a checkpoint was being written in the background
    is_hit: bool  # False: the target had just ended by itself


@dataclass
class InjectionStats:
    """What happened over all rounds."""

    injected: list[InjectedFault] = field(default_factory=list)
    recovered_s: list[float] = field(default_factory=list)
    num_launches: int = 0
    num_attempts: int = 0
    num_repeated: int = 0  # steps
    gave_up: list[str] = field(default_factory=list)  # ends of the logs of launchers that ended by themselves

    @property
    def kills(self) -> list[InjectedFault]:
        """The faults that killed their target."""
        return [fault for fault in self.injected if fault.act != "stop, then let go on" and fault.is_hit]

    @property
    def num_kills(self) -> int:
        return len(self.kills)

    @property
    def num_hits(self) -> int:
        """The number of kills, and of stops after which the target continued."""
        return sum(fault.is_hit for fault in self.injected)


class _Outage(NamedTuple):
    """A kill from which the job has not recovered yet."""

    description: str
    since: float


class FaultInjector:
    """Trains with a launcher, injects the planned faults and checks the runs."""

    def __init__(
        self,
        settings: Sequence[str],
        folder: Path,
        memory: Path,
        plan: Sequence[PlannedFault],
        first_processes: int,
        report: Callable[[str], None],
    ) -> None:
        """Prepare to carry out a plan.

        Args:
            settings: the config and its overrides, as `lockstep train` takes them.
            folder: where to put the rounds' run folders and logs; the undisturbed run is in its `reference`.
            memory: the folder for the launchers' shared memory.
            plan: the faults, in order.
            first_processes: the number of processes of the first launcher.
            report: called with a line of progress.
        """
        self.stats = InjectionStats()
        self._settings = list(settings)
        self._folder = folder
        self._memory = memory
        self._processes = MarkedProcesses(environment.MEMORY_FOLDER_VARIABLE, str(memory))
        self._pending = deque(plan)
        self._planned_kills = sum(fault.is_kill for fault in plan)
        self._nproc = first_processes
        self._report = report
        self._round = 0
        self._job: LaunchedJob | None = None
        self._watcher = ProgressWatcher()
        self._last_kill_at = 0.0
        self._is_disturbed = False  # since the launcher was started
        self._outage: _Outage | None = None
        self._problems: list[str] = []  # that ended this round
        self._leftovers = LeftoverCheck(self._processes, memory)
        self._reference = RunFolder(folder / "reference")
        self._stuck_s = _STUCK_S

    def run_rounds(self, reference_s: float) -> list[list[ChaosCheck]]:
        """Make rounds until all kills are made, and return the checks of each.

        `reference_s` is how long the undisturbed run took; it must exist already.
        """
        self._stuck_s = max(_STUCK_S, 3 * reference_s)
        rounds: list[list[ChaosCheck]] = []
        is_possible = True
        try:
            while not rounds or (self._pending and is_possible and all(check.is_passed for check in rounds[-1])):
                self._round += 1
                num_hits = self.stats.num_hits
                rounds.append(self._make_round(RunFolder(self._folder / f"round-{self._round}")))
                if self._pending and self.stats.num_hits == num_hits:
                    is_possible = self._relax_next_fault()
        finally:
            if self._job is not None:
                self._job.kill()
            self._processes.kill_all()
        return rounds

    def _relax_next_fault(self) -> bool:
        """Drop the conditions of the next fault, since a whole run had no moment for it; False if it has none left."""
        relaxed = replace(self._pending[0], victim="launcher", moment="step", after_steps=0, delay_s=0.0)
        was_relaxed, self._pending[0] = self._pending[0] == relaxed, relaxed
        return not was_relaxed

    def _make_round(self, run: RunFolder) -> list[ChaosCheck]:
        self._problems = []
        self._start_launcher(run)
        while not self._problems:
            fault = self._pending[0] if self._pending else None
            if fault is not None and (target := self._wait_for_moment(fault, run)) is not None:
                self._pending.popleft()
                self._inject(fault, target, run)
            elif self._is_run_over(run, wait=fault is None):
                break
        return self._check(run)

    def _start_launcher(self, run: RunFolder) -> None:
        self.stats.num_launches += 1
        arguments = ["train", *self._settings, "--run", str(run.path), "--quiet"]
        arguments += ["-n", str(self._nproc), "--max-restarts", _UNLIMITED_RESTARTS]
        self._job = LaunchedJob(arguments, self._memory, self._processes, _log_of(run))
        self._last_kill_at = self._job.started_at
        self._is_disturbed = False

    def _wait_for_moment(self, fault: PlannedFault, run: RunFolder) -> FaultTarget | None:
        """Wait for the fault's moment and return its target; None if the launcher ended first."""
        assert self._job is not None
        deadline = time.monotonic() + _MOMENT_TIMEOUT_S
        started_at = self._last_kill_at if fault.victim in ("launcher", "fork server", "everything") else None
        while self._job.exit_code() is None:
            progress, now = self._look(), time.monotonic()
            if progress.first_step is None:  # `_look` has its own time limit for recovery
                deadline = now + _MOMENT_TIMEOUT_S
            if started_at is None and (progress.heartbeats or fault.victim == "data worker"):
                started_at = now
            if fault.moment == "start":
                is_started = progress.first_step is not None  # it was quicker than the planned delay
                has_come = started_at is not None and (is_started or now >= started_at + fault.delay_s)
            else:
                has_come = _has_come(fault, progress, run)
            if has_come or now > deadline:
                if fault.moment != "start":
                    time.sleep(fault.delay_s)
                target = self._job.find_target(fault)
                if target is None and now > deadline:  # fall back to the launcher, which is always there
                    target = self._job.find_target(replace(fault, victim="launcher"))
                if target is not None:
                    return target
            time.sleep(_POLL_S)
        return None

    def _inject(self, fault: PlannedFault, target: FaultTarget, run: RunFolder) -> None:
        assert self._job is not None
        heartbeat, is_saving, at = target.heartbeat, _is_saving(run, target.heartbeat), time.monotonic()
        if fault.act == "kill":
            is_hit = self._send(target, signal.SIGKILL)
        else:
            self._send(target, signal.SIGSTOP)
            try:
                time.sleep(fault.stop_s)
            finally:
                later = self._job.find_target(fault)  # the ranks of a stopped launcher or fork server continued
                if later is not None and later.pid == target.pid:
                    heartbeat = later.heartbeat
                is_saving, at = _is_saving(run, heartbeat), time.monotonic()
                is_hit = self._send(target, signal.SIGKILL if fault.is_kill else signal.SIGCONT)
        self._record(fault, target, heartbeat, is_saving=is_saving, is_hit=is_hit)
        if not is_hit:  # it has just ended by itself: repeat the fault, so that the number of kills is right
            if fault.is_kill:
                self._pending.appendleft(fault)
            return
        self._is_disturbed = True
        what = f"{target.name}{describe_place(heartbeat) or ' at its start'}{', saving' if is_saving else ''}"
        if fault.is_kill:
            self._after_kill(fault, target, what, at, run)
        else:
            self._report(f"stopped for {fault.stop_s:.1f} s: {what}")

    def _after_kill(self, fault: PlannedFault, target: FaultTarget, what: str, at: float, run: RunFolder) -> None:
        assert self._job is not None
        self._end_outage("killed again before it recovered")
        self._outage = _Outage(f"kill {self.stats.num_kills} of {self._planned_kills}: {what}", at)
        self._last_kill_at = at
        self._watcher.expect_ranks_to_end(self._job)
        if target.name in ("launcher", "everything"):
            self._job.wait()
            self._leftovers.expect_processes_to_end("was killed")
            self._job.remove_shared_memory()
            self._nproc = fault.processes
            self._start_launcher(run)

    def _send(self, target: FaultTarget, number: signal.Signals) -> bool:
        """Send a signal to the target; return whether it was still there."""
        is_hit = self._processes.send(target.pid, number)
        if target.name == "everything":
            for process in self._processes.find():
                self._processes.send(process.pid, number)
        return is_hit

    def _record(
        self, fault: PlannedFault, target: FaultTarget, heartbeat: Heartbeat | None, *, is_saving: bool, is_hit: bool
    ) -> None:
        injected = InjectedFault(
            t=round(time.time(), 3),
            number=fault.number,
            round=self._round,
            launch=self.stats.num_launches,
            processes=self._nproc,
            victim=target.name,
            pid=target.pid,
            act=fault.act,
            moment=fault.moment,
            phase=None if heartbeat is None else heartbeat.phase.name.lower(),
            step=None if heartbeat is None else heartbeat.step,
            is_saving=is_saving,
            is_hit=is_hit,
        )
        self.stats.injected.append(injected)
        append_json_line(self._folder / "attacks.jsonl", injected._asdict())

    def _is_run_over(self, run: RunFolder, *, wait: bool) -> bool:
        """Is the run done? A launcher that gave up is started again. `wait`: until the launcher has ended."""
        assert self._job is not None
        while wait and self._job.exit_code() is None and not self._problems:
            self._look()
            time.sleep(_POLL_S)
        code = self._job.exit_code()
        if self._problems:
            return True
        if code is None:
            return False
        self._leftovers.expect_processes_to_end(f"ended with exit code {code}")
        if code == 0:
            self._leftovers.expect_no_shared_memory()
            self._end_outage("the run was over")
            return True
        log = _log_of(run).read_text(errors="replace").rstrip()[-_MAX_LOG_CHARS:]
        self.stats.gave_up.append(log)
        append_json_line(self._folder / "attacks.jsonl", {"t": round(time.time(), 3), "gave_up": code, "words": log})
        if not self._is_disturbed:
            self._problems.append(f"an undisturbed launcher ended with exit code {code}: {log}")
            return True
        self._nproc = self._pending[0].processes if self._pending else self._nproc
        self._start_launcher(run)
        return False

    def _look(self) -> JobProgress:
        """Read the heartbeats, and check whether the job has recovered or is stuck."""
        assert self._job is not None
        progress = self._watcher.look(self._job)
        if progress.is_new:
            self._leftovers.record_sockets()
            if self._outage is not None:
                took_s = time.monotonic() - self._outage.since
                self.stats.recovered_s.append(took_s)
                self._end_outage(f"recovered after step {progress.first_step} in {took_s:.1f} s")
        if self._watcher.idle_s > self._stuck_s:
            processes = ", ".join(map(str, self._processes.find()))
            self._problems.append(f"no progress for {self._stuck_s:.0f} s: {processes}")
            self._job.kill()
        return progress

    def _end_outage(self, how: str) -> None:
        if self._outage is not None:
            self._report(f"{self._outage.description}; {how}")
            self._outage = None

    def _check(self, run: RunFolder) -> list[ChaosCheck]:
        if self._job is not None and self._job.exit_code() is None:
            self._job.kill()
        self.stats.num_attempts += num_attempts(run)
        end = read_end(self._reference)
        self.stats.num_repeated += max(0, num_steps_made(run) - (end["step"] if end else 0))
        return [
            ChaosCheck("after every fault the run continued to its end", tuple(self._problems)),
            *check_run(self._reference, run),
            check_audit(run, self._processes.variables),
            check_saved(self._reference, run, self._processes.variables),
            self._leftovers.check(),
        ]


def append_json_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a JSON object to a file with one object per line."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _log_of(run: RunFolder) -> Path:
    return run.path.with_suffix(".log")


def _has_come(fault: PlannedFault, progress: JobProgress, run: RunFolder) -> bool:
    if progress.first_step is None or progress.num_steps < fault.after_steps:
        return False
    phases = {heartbeat.phase for heartbeat in progress.heartbeats.values()}
    if fault.moment == "save":
        return Phase.SAVING in phases or _has_draft(run)
    if fault.moment == "evaluation":
        return Phase.EVALUATING in phases or Phase.DESIGNS in phases  # a search evaluates designs
    return any(map(is_training, progress.heartbeats.values()))


def _is_saving(run: RunFolder, heartbeat: Heartbeat | None) -> bool:
    """Is a checkpoint being written? A draft seen before an attempt has recovered was left by an earlier one."""
    return heartbeat is not None and has_recovered(heartbeat) and _has_draft(run)


def _has_draft(run: RunFolder) -> bool:
    return any(run.checkpoints.glob(".draft-*"))
