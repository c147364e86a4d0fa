"""The runs that a verification makes: which, on how many processes, and by which command. Their order is told here too.

Nothing is known of them but what they leave in their folders.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from lockstep.config import environment
from lockstep.config.environment import Observation
from lockstep.errors import EXIT_FAILED, EXIT_STOPPED, UserError
from lockstep.events.run_folder import RunFolder
from lockstep.supervision.witness import WitnessFiles

_STOP_GRACE_S = 10.0
_MAX_LOG_CHARS = 20_000  # of a run that failed


class Leg(NamedTuple):
    """A stretch of a run: one command."""

    processes: int
    stop_after: int | None = None  # steps; else to the end


class Trial(NamedTuple):
    name: str  # and its folder's
    title: str
    legs: tuple[Leg, ...]

    @property
    def resumed_after(self) -> int | None:
        return self.legs[0].stop_after


class Failure(NamedTuple):
    exit_code: int
    text: str  # what the run had to say


def first_trial() -> Trial:
    """What the others are compared with."""
    return Trial("one", "one process", (Leg(1),))


def second_trial(processes: int) -> Trial:
    return Trial("many", f"{processes} processes", (Leg(processes),))


def resumed_trials(processes: int, steps: int) -> list[Trial]:
    half, many = steps // 2, f"{processes} processes"
    stopped = f"stopped after step {half}, resumed on"
    return [
        Trial("many-then-one", f"{many}, {stopped} one", (Leg(processes, half), Leg(1))),
        Trial("one-then-many", f"one process, {stopped} {processes}", (Leg(1, half), Leg(processes))),
    ]


def repeated_trial() -> Trial:
    return Trial("one-again", "one process, once more", (Leg(1),))


@dataclass(frozen=True)
class TrialPlace:
    """Where a trial leaves what it makes, in the verification's folder."""

    folder: Path
    trial: Trial

    @property
    def run(self) -> Path:
        """The run's folder, or the folder of a script's runs."""
        return self.folder / self.trial.name

    @property
    def log(self) -> Path:
        return self.folder / f"{self.trial.name}.log"

    def ranks(self, leg: int) -> Path:
        """What each rank of a leg has printed and written; legs count from 1."""
        return self.folder / "ranks" / f"{self.trial.name}-{leg}"

    def witnesses(self) -> list[WitnessFiles]:
        """Of the first leg's ranks."""
        return [WitnessFiles(self.ranks(1), rank) for rank in range(self.trial.legs[0].processes)]


class Subject(Protocol):
    """What is verified."""

    def command(self, leg: Leg, place: TrialPlace) -> list[str]: ...

    def observation(self, leg: Leg, number: int, place: TrialPlace) -> Observation: ...

    def is_good(self, leg: Leg, exit_code: int) -> bool: ...

    def traces(self, place: TrialPlace) -> dict[str, Path]:
        """Of a trial's runs, each by its name; a config's one run has none."""
        ...


@dataclass(frozen=True)
class ConfigSubject:
    settings: Sequence[str]  # the config, and what is laid over it

    def command(self, leg: Leg, place: TrialPlace) -> list[str]:
        command = [sys.executable, "-m", "lockstep", "train", *self.settings, "--run", str(place.run)]
        command += ["-n", str(leg.processes)] if leg.processes > 1 else []
        return command + (["--stop-after", str(leg.stop_after)] if leg.stop_after is not None else [])

    def observation(self, leg: Leg, number: int, place: TrialPlace) -> Observation:  # noqa: ARG002
        return Observation(place.ranks(number))

    def is_good(self, leg: Leg, exit_code: int) -> bool:
        if leg.stop_after is not None and exit_code == 0:
            raise UserError(
                f"the run ended before step {leg.stop_after}, where it was to be stopped: give fewer --steps"
            )
        return exit_code == (0 if leg.stop_after is None else EXIT_STOPPED)

    def traces(self, place: TrialPlace) -> dict[str, Path]:
        trace = RunFolder(place.run).trace
        return {"": trace} if trace.exists() else {}


@dataclass(frozen=True)
class ScriptSubject:
    target: Sequence[str]  # a script and its arguments, or -m and a module
    steps: int
    one_args: Sequence[str] = field(default=())  # for one process, after the others

    def command(self, leg: Leg, place: TrialPlace) -> list[str]:  # noqa: ARG002
        more = self.one_args if leg.processes == 1 else ()
        return [sys.executable, "-m", "lockstep", "run", "-n", str(leg.processes), *self.target, *more]

    def observation(self, leg: Leg, number: int, place: TrialPlace) -> Observation:
        return Observation(place.ranks(number), place.run, leg.stop_after or self.steps)

    def is_good(self, leg: Leg, exit_code: int) -> bool:  # noqa: ARG002
        return exit_code in (0, EXIT_STOPPED)  # it may have come to its own end before

    def traces(self, place: TrialPlace) -> dict[str, Path]:
        folders = sorted(place.run.iterdir()) if place.run.is_dir() else []
        found = {folder.name: RunFolder(folder).trace for folder in folders if RunFolder(folder).trace.exists()}
        return found or {trace.stem: trace for trace in sorted(place.ranks(1).glob("run-*.jsonl"))}


def make(subject: Subject, place: TrialPlace) -> Failure | None:
    """Make a trial's legs, one after another, until one fails."""
    for number, leg in enumerate(place.trial.legs, 1):
        variables = environment.observing(subject.observation(leg, number, place))
        with place.log.open("wb") as output:
            code = run_to_its_end(subject.command(leg, place), variables, output)
        if not subject.is_good(leg, code):
            text = place.log.read_text(errors="replace").rstrip()
            return Failure(code if code > 0 else EXIT_FAILED, text[-_MAX_LOG_CHARS:])  # below 0: it was killed
    return None


def run_to_its_end(
    command: Sequence[str], variables: Mapping[str, str], output: Any, errors: Any = subprocess.STDOUT
) -> int:
    """A command's exit code. If we are stopped meanwhile, so is it, with all that it has started.

    `output` and `errors`: where they go, as subprocess has it; errors to the output, unless told otherwise.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=errors,
        env=environment.snapshot() | dict(variables),
    )
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(_STOP_GRACE_S)
        finally:
            process.kill()
            process.wait()
        raise
