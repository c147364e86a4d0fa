"""Run a config undisturbed, then with injected faults, through the real `lockstep train`, and summarize the result."""

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lockstep.chaos.chaos_checks import ChaosCheck, read_end, read_run_trace
from lockstep.chaos.fault_injector import FaultInjector, InjectionStats, append_json_line
from lockstep.chaos.fault_plan import draw_fault_plan
from lockstep.chaos.job_processes import MarkedProcesses
from lockstep.chaos.launched_job import LaunchedJob
from lockstep.config import environment
from lockstep.config.plurals import count_noun
from lockstep.errors import EXIT_FAILED, LockstepError
from lockstep.events.run_folder import RunFolder

_MAX_LOG_CHARS = 20_000


@dataclass(frozen=True)
class ChaosOptions:
    """What the user asked for."""

    kills: int
    seed: int
    processes: int  # maximum
    with_data_workers: bool


@dataclass(frozen=True)
class ChaosVerdict:
    """The result: the checks of every round, and statistics."""

    kills: int  # requested
    stats: InjectionStats
    rounds: tuple[tuple[ChaosCheck, ...], ...]
    digest: str

    @property
    def exit_code(self) -> int:
        return 0 if self._is_nothing_lost and self.stats.num_kills >= self.kills else EXIT_FAILED

    @property
    def _is_nothing_lost(self) -> bool:
        return all(check.is_passed for checks in self.rounds for check in checks)

    def lines(self) -> list[str]:
        """Return the verdict for a person to read."""
        stats = self.stats
        lines = [str(check) for check in self._merged_checks()]
        lines.append(
            f"{count_noun(stats.num_kills, 'kill')} ({_listed(self._victims())}; {_listed(self._phases())}), "
            f"{count_noun(self._num_stops, 'stop')}"
        )
        recovered = stats.recovered_s
        times = (
            f"; recovered in {median(recovered):.1f} s (median), at most {max(recovered):.1f} s" if recovered else ""
        )
        lines.append(
            f"{count_noun(len(self.rounds), 'run')}, {count_noun(stats.num_launches, 'launcher')}, "
            f"{count_noun(stats.num_attempts, 'attempt')}, {count_noun(stats.num_repeated, 'step')} repeated{times}"
        )
        if stats.gave_up:
            lines.append(f"{count_noun(len(stats.gave_up), 'launcher')} gave up; the last: {stats.gave_up[-1]}")
        if not self._is_nothing_lost:
            lines.append("something was lost")
        elif self.exit_code != 0:
            made = f"{stats.num_kills} of {self.kills} kills"
            lines.append(f"nothing was lost, but only {made} were possible: choose a config that runs for longer")
        else:
            lines.append(f"nothing was lost: digest {self.digest}")
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return the verdict for a program to read."""
        stats = self.stats
        return {
            "ok": self.exit_code == 0,
            "digest": self.digest,
            "kills": stats.num_kills,
            "stops": self._num_stops,
            "victims": dict(self._victims()),
            "phases": dict(self._phases()),
            "rounds": len(self.rounds),
            "launches": stats.num_launches,
            "gave_up": len(stats.gave_up),
            "attempts": stats.num_attempts,
            "steps_made_again": stats.num_repeated,
            "recovered_s": [round(seconds, 2) for seconds in stats.recovered_s],
            "checks": [{"name": check.name, "faults": check.problems} for check in self._merged_checks()],
        }

    def _merged_checks(self) -> list[ChaosCheck]:
        """Merge each check over all rounds."""
        by_name: dict[str, list[str]] = {}
        for number, checks in enumerate(self.rounds, start=1):
            for check in checks:
                by_name.setdefault(check.name, []).extend(f"round {number}: {problem}" for problem in check.problems)
        return [ChaosCheck(name, tuple(problems)) for name, problems in by_name.items()]

    @property
    def _num_stops(self) -> int:
        """The number of stops after which the target continued."""
        return self.stats.num_hits - self.stats.num_kills

    def _victims(self) -> Counter[str]:
        return Counter("data worker" if "worker" in kill.victim else kill.victim for kill in self.stats.kills)

    def _phases(self) -> Counter[str]:
        return Counter("saving" if kill.is_saving else kill.phase or "starting" for kill in self.stats.kills)


class ReferenceFailed(LockstepError):
    """The undisturbed run failed."""


def run_chaos(
    config: str, overrides: Sequence[str], options: ChaosOptions, *, folder: Path, report: Callable[[str], None]
) -> ChaosVerdict:
    """Train undisturbed, then with faults, and compare.

    Args:
        config: a YAML file or the name of a built-in recipe.
        overrides: the user's overrides, and those of `trial_overrides`.
        options: how many faults, and of which kinds.
        folder: where to put the runs, the plan and the log of faults.
        report: called with a line of progress.
    """
    settings = [config, *overrides]
    memory = Path(tempfile.mkdtemp(prefix="lockstep-chaos-", dir=environment.shared_memory_root()))
    try:
        started_at = time.monotonic()
        reference = _run_reference(settings, folder, memory)
        took_s = time.monotonic() - started_at
        report(f"undisturbed: step {reference['step']}, digest {reference['digest']}, {took_s:.1f} s")
        plan = draw_fault_plan(
            options.seed,
            options.kills,
            processes=options.processes,
            steps=reference["step"],
            with_data_workers=options.with_data_workers,
        )
        for fault in plan:
            append_json_line(folder / "plan.jsonl", fault.as_json())
        injector = FaultInjector(settings, folder, memory, plan, options.processes, report)
        rounds = injector.run_rounds(reference_s=took_s)
    finally:
        shutil.rmtree(memory, ignore_errors=True)
    return ChaosVerdict(options.kills, injector.stats, tuple(map(tuple, rounds)), reference["digest"])


def _run_reference(settings: Sequence[str], folder: Path, memory: Path) -> dict[str, Any]:
    """Train on one process without faults, and return the run's end event."""
    run, log = RunFolder(folder / "reference"), folder / "reference.log"
    processes = MarkedProcesses(environment.MEMORY_FOLDER_VARIABLE, str(memory))
    job = LaunchedJob(["train", *settings, "--run", str(run.path), "--quiet", "-n", "1"], memory, processes, log)
    try:
        code = job.wait()
    finally:
        job.kill()
        processes.kill_all()  # anything left behind must not be blamed on a fault
    end = read_end(run)
    if code != 0 or end is None or not read_run_trace(run.trace):
        text = log.read_text(errors="replace").rstrip()[-_MAX_LOG_CHARS:]
        failure = ReferenceFailed(f"the undisturbed run ended with exit code {code}:\n{text}")
        failure.exit_code = code if code > 0 else EXIT_FAILED
        raise failure
    return end


def _listed(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())
