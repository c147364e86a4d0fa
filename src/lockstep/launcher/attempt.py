"""The ranks of one attempt, as their agent sees them: how they stand, where they are, what they have left word of."""

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lockstep.launcher.processes import Processes
from lockstep.supervision.examination import RankNow
from lockstep.supervision.failure import RankEnd, only_victims, read_announced_end, read_report
from lockstep.supervision.pulse import Page, Reading
from lockstep.supervision.rank_files import RankFiles

_CAUSE_MAY_LAG_S = 3.0
_LOOK_EVERY_S = 0.05
_MAX_PATH_BYTES = 4096


class Attempt:
    def __init__(self, folder: Path, processes: Processes, ranks: Sequence[int]) -> None:
        """`ranks`: of this machine, in the order of their processes."""
        self._folder = folder
        self._processes = processes
        self._ranks = list(ranks)
        self._pages: dict[int, Page] = {}  # of those that have begun

    def files(self, rank: int) -> RankFiles:
        return RankFiles(self._folder, rank)

    def reading(self, rank: int) -> Reading | None:
        if rank not in self._pages:
            with suppress(OSError, ValueError):  # not there yet, or still empty
                self._pages[rank] = Page(self.files(rank).pulse)
        return self._pages[rank].read() if rank in self._pages else None

    def readings(self) -> dict[int, Reading | None]:
        return {rank: self.reading(rank) for rank in self._ranks}

    @property
    def step(self) -> int:
        """How many updates all ranks have completed; one that got the others' gradients may be a step ahead."""
        return min((reading.step for reading in self.readings().values() if reading is not None), default=0)

    def ends(self) -> list[RankEnd]:
        """How each rank stands."""
        ends = []
        for rank, process in zip(self._ranks, self._processes.ranks, strict=True):
            files = self.files(rank)
            exit_code = read_announced_end(files.end) if process.is_running else process.exit_code
            ends.append(RankEnd(rank, exit_code, read_report(files.report), self.reading(rank)))
        return ends

    def now(self, ends: Sequence[RankEnd]) -> list[RankNow]:
        """The same, for who looks for hangs."""
        return [
            RankNow(end.rank, process.pid, end.exit_code, end.pulse)
            for end, process in zip(ends, self._processes.ranks, strict=True)
        ]

    def await_the_cause(self) -> list[RankEnd]:
        """A rank closes its connections before it is quite dead: its victims can be seen to end first."""
        deadline = time.monotonic() + _CAUSE_MAY_LAG_S
        while only_victims(ends := self.ends()) and time.monotonic() < deadline:
            self._processes.look(_LOOK_EVERY_S)
        return ends

    def run_folder(self) -> Path | None:
        """That a rank has opened, if any has."""
        for rank in self._ranks:
            with suppress(OSError, UnicodeDecodeError):
                with self.files(rank).run_folder.open() as file:
                    run_folder = Path(file.read(_MAX_PATH_BYTES))
                if run_folder.is_dir():
                    return run_folder
        return None
