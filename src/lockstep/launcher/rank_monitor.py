"""Where a dead rank is noticed: the state of each rank of the current attempt, polled by its agent.

A rank's death reaches the agent in three steps: the kernel tells the fork server (`fork_server`), which tells the agent
(`rank_processes`), which asks here at every poll whether a rank has failed. `supervision.failure_report` then finds the
cause, and `restart_policy` decides whether to restart. Ranks that hang are found by `supervision.hang_detector`.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.launcher.rank_processes import RankProcesses
from lockstep.supervision.agent_folder import RankFiles
from lockstep.supervision.failure_report import RankExit, has_only_victims, read_announced_exit, read_error_report
from lockstep.supervision.flight_recorder import Collective, read_collectives
from lockstep.supervision.heartbeat import Heartbeat, HeartbeatPage
from lockstep.supervision.rank_probe import RankStatus, ask_for_collectives

_CAUSE_MAY_LAG_S = 3.0
_POLL_INTERVAL_S = 0.05
_MAX_PATH_BYTES = 4096


class RankMonitor:
    """The ranks of one attempt on this machine: their processes, heartbeats and files."""

    def __init__(self, folder: Path, processes: RankProcesses, ranks: Sequence[int]) -> None:
        """`ranks` are this machine's, in the order of their processes."""
        self._folder = folder
        self._processes = processes
        self._ranks = list(ranks)
        self._pages: dict[int, HeartbeatPage] = {}  # of the ranks that have started to write them

    def has_dead_rank(self) -> bool:
        """Has the process of a rank ended with an error or by a signal?"""
        return any(process.exit_code for process in self._processes.ranks)

    def have_all_succeeded(self) -> bool:
        """Have the processes of all ranks ended with exit code 0?"""
        return all(process.exit_code == 0 for process in self._processes.ranks)

    def exits(self) -> list[RankExit]:
        """Return how each rank has ended, with its error report and last heartbeat; or that it is still running.

        A rank whose script is over counts as ended, though its process may take a few more seconds.
        """
        exits = []
        for rank, process in zip(self._ranks, self._processes.ranks, strict=True):
            files = self.files(rank)
            exit_code = read_announced_exit(files.end) if process.is_running else process.exit_code
            exits.append(RankExit(rank, exit_code, read_error_report(files.report), self.heartbeat(rank)))
        return exits

    def wait_for_cause(self) -> list[RankExit]:
        """Return the exits once they contain the cause of a failure, or after a few seconds.

        A dying rank closes its connections before its process ends, so its victims may end before it.
        """
        deadline = time.monotonic() + _CAUSE_MAY_LAG_S
        while has_only_victims(exits := self.exits()) and time.monotonic() < deadline:
            self._processes.poll(_POLL_INTERVAL_S)
        return exits

    def last_collectives(self, exits: Sequence[RankExit]) -> dict[int, list[Collective]]:
        """Return the last collectives of the ranks that are running, or have failed because they lost contact."""
        running = {
            end.rank: end.heartbeat.num_acknowledgements for end in exits if end.exit_code is None and end.heartbeat
        }
        ask_for_collectives(running, self.files, self.heartbeat)
        victims = {end.rank for end in exits if end.report is not None and end.report.communication}
        return {rank: read_collectives(self.files(rank).collectives) for rank in sorted(victims.union(running))}

    def statuses(self, exits: Sequence[RankExit]) -> list[RankStatus]:
        """Return `exits` in the form that the hang detector takes."""
        return [
            RankStatus(end.rank, process.pid, end.exit_code, end.heartbeat)
            for end, process in zip(exits, self._processes.ranks, strict=True)
        ]

    def files(self, rank: int) -> RankFiles:
        """Return the files of a rank in the agent's folder."""
        return RankFiles(self._folder, rank)

    def heartbeat(self, rank: int) -> Heartbeat | None:
        """Return the current heartbeat of a rank; None if it has not begun to write one."""
        if rank not in self._pages:
            with suppress(OSError, ValueError):  # not there yet, or still empty
                self._pages[rank] = HeartbeatPage(self.files(rank).heartbeat)
        return self._pages[rank].read() if rank in self._pages else None

    def heartbeats(self) -> dict[int, Heartbeat | None]:
        """Return the heartbeats of all ranks of this machine, in the order of their processes."""
        return {rank: self.heartbeat(rank) for rank in self._ranks}

    @property
    def step(self) -> int:
        """The number of updates that all ranks have completed; some may be a step ahead."""
        return min((each.step for each in self.heartbeats().values() if each is not None), default=0)

    def run_folder(self) -> Path | None:
        """Return the run folder that a rank has opened, if any has."""
        for rank in self._ranks:
            with suppress(OSError):
                with self.files(rank).run_folder.open("rb") as file:
                    run_folder = Path(os.fsdecode(file.read(_MAX_PATH_BYTES)))
                if run_folder.is_dir():
                    return run_folder
        return None
