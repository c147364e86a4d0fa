"""A launcher and the processes it has started: start it, find targets for faults, and watch its progress."""

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lockstep.chaos.fault_plan import PlannedFault
from lockstep.chaos.job_processes import MarkedProcesses
from lockstep.config import environment
from lockstep.supervision.agent_folder import FOLDER_PREFIX
from lockstep.supervision.heartbeat import GENERATION_PHASES, STEP_PHASES, Heartbeat, HeartbeatPage, Phase
from lockstep.supervision.process_title import CHILD_OF_RANK, FORK_SERVER

_WITHOUT_TITLE = "lockstep.launcher.fork_server"  # the command line of both, where no title can be shown


class FaultTarget(NamedTuple):
    """The process that a fault hits."""

    pid: int  # for "everything", the launcher's
    name: str
    heartbeat: Heartbeat | None  # of its rank; for a launcher or fork server, of any rank


class LaunchedJob:
    """A `lockstep` command that runs in the background, with the processes it starts."""

    def __init__(self, arguments: Sequence[str], memory: Path, processes: MarkedProcesses, log: Path) -> None:
        """Start `lockstep` with these arguments; `memory` is the folder for its shared memory."""
        self._memory = memory
        self._processes = processes
        self._memory_before = set(memory.iterdir())
        self._fork_server: int | None = None
        with log.open("ab") as output:
            self._launcher = subprocess.Popen(
                [sys.executable, "-m", "lockstep", *arguments],
                env=environment.all_variables() | processes.variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C at our terminal is for this process only
            )
        self.started_at = time.monotonic()

    def exit_code(self) -> int | None:
        """Return the launcher's exit code; None while it runs."""
        return self._launcher.poll()

    def wait(self) -> int:
        """Wait for the launcher to end and return its exit code."""
        return self._launcher.wait()

    def kill(self) -> None:
        """Kill the launcher, if it is running."""
        self._launcher.kill()
        self._launcher.wait()

    def heartbeats(self) -> dict[int, Heartbeat]:
        """Return the heartbeats by rank; those of dead ranks are included until the next attempt begins."""
        found: dict[int, Heartbeat] = {}
        with suppress(FileNotFoundError):  # a launcher may remove its folder at any time
            for path in self._memory.glob("*/rank-*.heartbeat"):
                if path.parent not in self._memory_before:
                    with suppress(OSError, ValueError):  # removed meanwhile, or still empty
                        heartbeat = HeartbeatPage(path).read()
                        if heartbeat is not None:
                            found[int(path.stem.removeprefix("rank-"))] = heartbeat
        return found

    def remove_shared_memory(self) -> None:
        """Remove what a killed launcher left, as the next one would; what its run keeps in memory is not removed."""
        for path in set(self._memory.iterdir()) - self._memory_before:
            if path.name.startswith(FOLDER_PREFIX):
                shutil.rmtree(path)

    def find_target(self, fault: PlannedFault) -> FaultTarget | None:
        """Return the process to hit, if there is one now."""
        heartbeats = self.heartbeats()
        ranks = {rank: heartbeats[rank] for rank in sorted(heartbeats)}
        ranks = {rank: beat for rank, beat in ranks.items() if self._processes.is_marked(beat.pid)}
        any_heartbeat = next(iter(ranks.values()), None)
        if fault.victim in ("launcher", "everything"):
            return FaultTarget(self._launcher.pid, fault.victim, any_heartbeat)
        if fault.victim == "fork server":
            fork_server = self._find_fork_server()
            return None if fork_server is None else FaultTarget(fork_server, "fork server", any_heartbeat)
        if fault.victim == "data worker":
            candidates = self._data_workers(ranks)
        else:
            numbers = [0] if fault.victim == "rank 0" else list(ranks)
            candidates = [FaultTarget(ranks[n].pid, f"rank {n}", ranks[n]) for n in numbers if n in ranks]
        return candidates[int(fault.lot * len(candidates))] if candidates else None

    def _data_workers(self, ranks: Mapping[int, Heartbeat]) -> list[FaultTarget]:
        rank_of = {heartbeat.pid: rank for rank, heartbeat in ranks.items()}
        return [
            FaultTarget(process.pid, f"data worker of rank {rank}", ranks[rank])
            for process in self._processes.find()
            if (rank := rank_of.get(process.parent)) is not None
            and any(words in process.command for words in (CHILD_OF_RANK, _WITHOUT_TITLE))  # no other program
        ]

    def _find_fork_server(self) -> int | None:
        if self._fork_server is None or not self._processes.is_marked(self._fork_server):
            children = (process for process in self._processes.find() if process.parent == self._launcher.pid)
            names = (FORK_SERVER, _WITHOUT_TITLE)
            self._fork_server = next((p.pid for p in children if any(name in p.command for name in names)), None)
        return self._fork_server


class JobProgress(NamedTuple):
    """The progress of the attempt that is alive, as far as its heartbeats show."""

    heartbeats: Mapping[int, Heartbeat]  # by rank
    first_step: int | None  # completed updates when it recovered; None: it has not recovered yet
    is_new: bool  # it recovered just now

    @property
    def num_steps(self) -> int:
        """Steps made since it recovered."""
        return max(heartbeat.step for heartbeat in self.heartbeats.values()) - (self.first_step or 0)


class ProgressWatcher:
    """Follows a job from attempt to attempt: which is alive, where it began, and whether it makes progress."""

    def __init__(self) -> None:
        self._ending_pids: set[int] = set()  # of ranks that have ended, or are about to, because of a fault
        self._first_steps: dict[frozenset[int], int] = {}  # of each attempt, by its ranks' process ids
        self._last_seen: object = None
        self._last_change_at = 0.0

    def look(self, job: LaunchedJob) -> JobProgress:
        """Read the heartbeats."""
        everyone = job.heartbeats()
        alive = {rank: beat for rank, beat in everyone.items() if beat.pid not in self._ending_pids}
        # Of all ranks: a rank does not necessarily end with a data worker that had finished its work.
        seen = (job, {(beat.pid, beat.step, beat.phase) for beat in everyone.values()})
        if seen != self._last_seen:
            self._last_seen, self._last_change_at = seen, time.monotonic()
        attempt = frozenset(beat.pid for beat in alive.values())
        is_new = bool(alive) and attempt not in self._first_steps and all(map(has_recovered, alive.values()))
        if is_new:
            self._first_steps[attempt] = max(beat.step for beat in alive.values())
        return JobProgress(alive, self._first_steps.get(attempt), is_new)

    def expect_ranks_to_end(self, job: LaunchedJob) -> None:
        """Note that a process was killed: all ranks that run now are about to end."""
        self._ending_pids |= {heartbeat.pid for heartbeat in job.heartbeats().values()}

    @property
    def idle_s(self) -> float:
        """How long nothing has changed."""
        return time.monotonic() - self._last_change_at


def is_training(heartbeat: Heartbeat) -> bool:
    """Is the rank in a step, or in a search's generation?"""
    return heartbeat.phase in (*STEP_PHASES, *GENERATION_PHASES)


def has_recovered(heartbeat: Heartbeat) -> bool:
    """Has the rank started up? It is making steps, or is past them."""
    return is_training(heartbeat) or heartbeat.phase in (
        Phase.SAVING,
        Phase.EVALUATING,
        Phase.FINISHING,
        Phase.LEAVING,
    )
