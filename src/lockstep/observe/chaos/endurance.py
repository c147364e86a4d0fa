"""Does a config endure? One run that is left alone, then runs under attack, each by the real `lockstep train`."""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.config import environment
from lockstep.errors import EXIT_FAILED, LockstepError
from lockstep.events.run_folder import RunFolder
from lockstep.observe.chaos.checks import Check, read_end, read_trace
from lockstep.observe.chaos.job import Job, kill_all
from lockstep.observe.chaos.plan import draw_plan
from lockstep.observe.chaos.processes import Marked
from lockstep.observe.chaos.siege import Siege, Tally, append

_MAX_LOG_CHARS = 20_000


@dataclass(frozen=True)
class Assault:
    """What is asked for."""

    kills: int
    seed: int
    processes: int  # the most
    with_data_workers: bool


@dataclass(frozen=True)
class Verdict:
    kills: int  # that were asked for
    tally: Tally
    rounds: tuple[tuple[Check, ...], ...]
    digest: str

    @property
    def exit_code(self) -> int:
        return 0 if self._is_nothing_lost and self.tally.num_kills >= self.kills else EXIT_FAILED

    @property
    def _is_nothing_lost(self) -> bool:
        return all(check.is_passed for each in self.rounds for check in each)

    def lines(self) -> list[str]:
        tally = self.tally
        lines = [str(check) for check in self._together()]
        lines.append(
            f"{_count(tally.num_kills, 'kill')} ({_listed(self._victims())}; {_listed(self._phases())}), "
            f"{_count(self._num_stops, 'stop')}"
        )
        recovered = tally.recovered_s
        times = f"; back in {median(recovered):.1f} s (median), {max(recovered):.1f} s at most" if recovered else ""
        lines.append(
            f"{_count(len(self.rounds), 'run')}, {_count(tally.num_launches, 'launcher')}, "
            f"{_count(tally.num_attempts, 'attempt')}, {_count(tally.num_repeated, 'step')} made again{times}"
        )
        if tally.gave_up:
            lines.append(f"{_count(len(tally.gave_up), 'launcher')} gave up; the last: {tally.gave_up[-1]}")
        if not self._is_nothing_lost:
            lines.append("something was lost")
        elif self.exit_code != 0:
            made = f"{tally.num_kills} of {self.kills} kills"
            lines.append(f"nothing was lost, but only {made} could be made: choose a config that runs for longer")
        else:
            lines.append(f"nothing was lost: digest {self.digest}")
        return lines

    def as_json(self) -> dict[str, Any]:
        tally = self.tally
        return {
            "ok": self.exit_code == 0,
            "digest": self.digest,
            "kills": tally.num_kills,
            "stops": self._num_stops,
            "victims": dict(self._victims()),
            "phases": dict(self._phases()),
            "rounds": len(self.rounds),
            "launches": tally.num_launches,
            "gave_up": len(tally.gave_up),
            "attempts": tally.num_attempts,
            "steps_made_again": tally.num_repeated,
            "recovered_s": [round(seconds, 2) for seconds in tally.recovered_s],
            "checks": [{"name": check.name, "faults": check.faults} for check in self._together()],
        }

    def _together(self) -> list[Check]:
        """Each check over all rounds."""
        by_name: dict[str, list[str]] = {}
        for number, each in enumerate(self.rounds, start=1):
            for check in each:
                by_name.setdefault(check.name, []).extend(f"round {number}: {fault}" for fault in check.faults)
        return [Check(name, tuple(faults)) for name, faults in by_name.items()]

    @property
    def _num_stops(self) -> int:
        """After which the victim was let go on."""
        return self.tally.num_hits - self.tally.num_kills

    def _victims(self) -> Counter[str]:
        return Counter("data worker" if "worker" in made.victim else made.victim for made in self.tally.kills)

    def _phases(self) -> Counter[str]:
        return Counter("saving" if made.is_saving else made.phase or "starting" for made in self.tally.kills)


class ReferenceFailed(LockstepError):
    """The run that was left alone did not come to its end."""


def endure(
    config: str, overrides: Sequence[str], assault: Assault, *, folder: Path, tell: Callable[[str], None]
) -> Verdict:
    """Train in `folder`, alone and then under attack, telling how it goes; `overrides`: with `trial_overrides`."""
    settings = [config, *overrides]
    memory = Path(tempfile.mkdtemp(prefix="lockstep-chaos-", dir=environment.memory_folder()))
    try:
        began = time.monotonic()
        reference = _make_reference(settings, folder, memory)
        took_s = time.monotonic() - began
        tell(f"left alone: step {reference['step']}, digest {reference['digest']}, {took_s:.1f} s")
        plan = draw_plan(
            assault.seed,
            assault.kills,
            processes=assault.processes,
            steps=reference["step"],
            with_data_workers=assault.with_data_workers,
        )
        for attack in plan:
            append(folder / "plan.jsonl", attack.as_json())
        siege = Siege(settings, folder, memory, plan, assault.processes, tell)
        rounds = siege.lay(reference_s=took_s)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    return Verdict(assault.kills, siege.tally, tuple(map(tuple, rounds)), reference["digest"])


def _make_reference(settings: Sequence[str], folder: Path, memory: Path) -> dict[str, Any]:
    run, log = RunFolder(folder / "reference"), folder / "reference.log"
    marked = Marked(environment.MEMORY_FOLDER, str(memory))
    job = Job(["train", *settings, "--run", str(run.path), "--quiet", "-n", "1"], memory, marked, log)
    try:
        code = job.wait()
    finally:
        job.end()
        kill_all(marked)  # what it leaves is not to be blamed on an attack
    end = read_end(run)
    if code != 0 or end is None or not read_trace(run.trace):
        words = log.read_text(errors="replace").rstrip()[-_MAX_LOG_CHARS:]
        failure = ReferenceFailed(f"the run that was left alone ended with exit code {code}:\n{words}")
        failure.exit_code = code if code > 0 else EXIT_FAILED
        raise failure
    return end


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


def _count(num: int, noun: str) -> str:
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"
