"""One launcher and all that it has started, as an attacker sees it: who is there, in which step and phase."""

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lockstep.config import environment
from lockstep.observe.chaos.plan import Attack
from lockstep.observe.chaos.processes import Marked, Process
from lockstep.supervision.pulse import IN_A_GENERATION, IN_A_STEP, Page, Phase, Reading

_NURSERY = "lockstep.launcher.nursery"
_PAUSE_S = 0.02


class Target(NamedTuple):
    """Whom an attack hits."""

    pid: int  # of everything, the launcher's
    name: str
    pulse: Reading | None  # of the rank that it is or belongs to; of a launcher or nursery, of any rank


class Job:
    def __init__(self, arguments: Sequence[str], memory: Path, marked: Marked, log: Path) -> None:
        self._memory = memory
        self._marked = marked
        self._before = set(memory.iterdir())
        self._nursery: int | None = None
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "lockstep", *arguments],
                env=environment.snapshot() | marked.variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # what is typed at our terminal is for us
            )
        self.started_at = time.monotonic()

    def exit_code(self) -> int | None:
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait()

    def pulses(self) -> dict[int, Reading]:
        """By rank, of those that have begun; also of dead ones, until the next attempt begins."""
        found: dict[int, Reading] = {}
        with suppress(FileNotFoundError):  # a launcher removes its folder as we look
            for path in self._memory.glob("*/rank-*.pulse"):
                if path.parent not in self._before:
                    with suppress(OSError, ValueError):  # it goes as we look, or is still empty
                        reading = Page(path).read()
                        if reading is not None:
                            found[int(path.stem.removeprefix("rank-"))] = reading
        return found

    def remove_folder(self) -> None:
        """Of the launcher, which was killed: a later one would remove it. What its run keeps in memory stays."""
        for path in set(self._memory.iterdir()) - self._before:
            if path.is_dir() and all(entry.name == ".lock" or "rank-" in entry.name for entry in path.iterdir()):
                shutil.rmtree(path)

    def find(self, attack: Attack) -> Target | None:
        """Its victim, if there is one now. Quick: a moment passes."""
        ranks = {rank: pulse for rank, pulse in sorted(self.pulses().items()) if self._marked.is_one(pulse.pid)}
        some_pulse = next(iter(ranks.values()), None)
        if attack.victim in ("launcher", "everything"):
            return Target(self._process.pid, attack.victim, some_pulse)
        if attack.victim == "nursery":
            nursery = self._find_nursery()
            return None if nursery is None else Target(nursery, "nursery", some_pulse)
        if attack.victim == "data worker":
            of_rank = {pulse.pid: (rank, pulse) for rank, pulse in ranks.items()}
            workers = [
                Target(process.pid, f"data worker of rank {of_rank[process.parent][0]}", of_rank[process.parent][1])
                for process in self._marked.find()
                if process.parent in of_rank and _NURSERY in process.command  # a fork, not some other program
            ]
            return _drawn(workers, attack.lot)
        numbers = [0] if attack.victim == "rank 0" else list(ranks)
        return _drawn([Target(ranks[n].pid, f"rank {n}", ranks[n]) for n in numbers if n in ranks], attack.lot)

    def _find_nursery(self) -> int | None:
        if self._nursery is None or not self._marked.is_one(self._nursery):
            children = (process for process in self._marked.find() if process.parent == self._process.pid)
            self._nursery = next((process.pid for process in children if _NURSERY in process.command), None)
        return self._nursery

    def end(self) -> None:
        """Kill the launcher, if it runs."""
        self._process.kill()
        self._process.wait()


def await_none(marked: Marked, timeout_s: float) -> list[Process]:
    """Wait until none of them is left; those that are."""
    deadline = time.monotonic() + timeout_s
    while (left := marked.find()) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return left


def kill_all(marked: Marked) -> None:
    """Those that start others while we look included."""
    deadline = time.monotonic() + 10.0
    while (left := marked.find()) and time.monotonic() < deadline:
        for process in left:
            marked.send(process.pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def is_training(pulse: Reading) -> bool:
    return pulse.phase in (*IN_A_STEP, *IN_A_GENERATION)


def is_back(pulse: Reading) -> bool:
    """Has its rank come to where there are steps, or beyond?"""
    return is_training(pulse) or pulse.phase in (Phase.SAVING, Phase.EVALUATING, Phase.FINISHING, Phase.LEAVING)


def _drawn(candidates: Sequence[Target], lot: float) -> Target | None:
    return candidates[int(lot * len(candidates))] if candidates else None
