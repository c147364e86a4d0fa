"""The runs that `lockstep verify` makes: on how many processes, by which command, and where their files go.

Everything that is known about a run comes from the files in its folder.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from lockstep.command_line.trial_runs import run_to_end
from lockstep.config import environment
from lockstep.config.environment import VerifyRequest
from lockstep.errors import EXIT_DIFFERENT, EXIT_FAILED, EXIT_STOPPED, UserError
from lockstep.events.run_folder import RunFolder
from lockstep.supervision.io_recorder import OutputRecord

_MAX_LOG_CHARS = 20_000

_HANG_STOP_S = "300"  # a few steps need less patience than a training


class RunSegment(NamedTuple):
    """A part of a run: one command."""

    processes: int
    stop_after: int | None = None  # steps; None: run to the end


class VerifyTrial(NamedTuple):
    """A run to compare with others, in one segment or in two, with a stop and a resume between."""

    name: str  # also the name of its folder
    title: str
    segments: tuple[RunSegment, ...]

    @property
    def resumed_after(self) -> int | None:
        """The step at which it is stopped and resumed."""
        return self.segments[0].stop_after


class TrialFailure(NamedTuple):
    """How a trial failed."""

    exit_code: int
    text: str  # the end of its log


def first_trial() -> VerifyTrial:
    """Return the trial on one process: the one that all others are compared with."""
    return VerifyTrial("one", "one process", (RunSegment(1),))


def second_trial(processes: int) -> VerifyTrial:
    """Return the trial on several processes."""
    return VerifyTrial("many", f"{processes} processes", (RunSegment(processes),))


def resumed_trials(processes: int, steps: int) -> list[VerifyTrial]:
    """Return the trials that are stopped halfway and resumed on another number of processes."""
    half, many = steps // 2, f"{processes} processes"
    stopped = f"stopped after step {half}, resumed on"
    return [
        VerifyTrial("many-then-one", f"{many}, {stopped} one", (RunSegment(processes, half), RunSegment(1))),
        VerifyTrial(
            "one-then-many", f"one process, {stopped} {processes}", (RunSegment(1, half), RunSegment(processes))
        ),
    ]


def repeated_trial() -> VerifyTrial:
    """Return the first trial again, which shows whether one process repeats itself."""
    return VerifyTrial("one-again", "one process, once more", (RunSegment(1),))


@dataclass(frozen=True)
class TrialFiles:
    """The paths of a trial's files, in the folder of the verification."""

    folder: Path
    trial: VerifyTrial

    @property
    def run(self) -> Path:
        """The run's folder, or the folder of a script's runs."""
        return self.folder / self.trial.name

    @property
    def log(self) -> Path:
        """The output of its commands."""
        return self.folder / f"{self.trial.name}.log"

    def rank_folder(self, segment: int) -> Path:
        """Return the folder for what each rank of a segment printed and wrote; segments count from 1."""
        return self.folder / "ranks" / f"{self.trial.name}-{segment}"

    def records(self) -> list[OutputRecord]:
        """Return the records of the first segment's ranks."""
        return [OutputRecord(self.rank_folder(1), rank) for rank in range(self.trial.segments[0].processes)]


class VerifySubject(Protocol):
    """What is verified: a config or a script."""

    def command(self, segment: RunSegment, files: TrialFiles) -> list[str]:
        """Return the command that runs a segment."""
        ...

    def verify_request(self, segment: RunSegment, number: int, files: TrialFiles) -> VerifyRequest:
        """Return what the ranks of a segment are asked to record."""
        ...

    def is_expected_exit(self, segment: RunSegment, exit_code: int) -> bool:
        """Is this the exit code of a segment that succeeded?"""
        ...

    def traces(self, files: TrialFiles) -> dict[str, Path]:
        """Return the traces of a trial's runs, by name; the only run of a config has the name \"\"."""
        ...


@dataclass(frozen=True)
class ConfigUnderTest:
    """A config, which is run by `lockstep train`."""

    settings: Sequence[str]  # the config and its overrides

    def command(self, segment: RunSegment, files: TrialFiles) -> list[str]:
        options = ["--stop-after", str(segment.stop_after)] if segment.stop_after is not None else []
        if segment.processes > 1:
            options += ["-n", str(segment.processes), "--hang-stop", _HANG_STOP_S]
        return [sys.executable, "-m", "lockstep", "train", *self.settings, "--run", str(files.run), *options]

    def verify_request(self, segment: RunSegment, number: int, files: TrialFiles) -> VerifyRequest:  # noqa: ARG002
        return VerifyRequest(files.rank_folder(number))

    def is_expected_exit(self, segment: RunSegment, exit_code: int) -> bool:
        if segment.stop_after is not None and exit_code == 0:
            raise UserError(
                f"the run ended before step {segment.stop_after}, where it was to be stopped: choose a smaller --steps"
            )
        return exit_code == (0 if segment.stop_after is None else EXIT_STOPPED)

    def traces(self, files: TrialFiles) -> dict[str, Path]:
        trace = RunFolder(files.run).trace
        return {"": trace} if trace.exists() else {}


@dataclass(frozen=True)
class ScriptUnderTest:
    """A script, which is run by `lockstep run`."""

    target: Sequence[str]  # a script and its arguments, or -m and a module
    steps: int
    one_args: Sequence[str] = field(default=())  # additional arguments, only on one process

    def command(self, segment: RunSegment, files: TrialFiles) -> list[str]:  # noqa: ARG002
        more = self.one_args if segment.processes == 1 else ()
        options = ["-n", str(segment.processes), "--hang-stop", _HANG_STOP_S]
        return [sys.executable, "-m", "lockstep", "run", *options, *self.target, *more]

    def verify_request(self, segment: RunSegment, number: int, files: TrialFiles) -> VerifyRequest:
        return VerifyRequest(files.rank_folder(number), files.run, segment.stop_after or self.steps)

    def is_expected_exit(self, segment: RunSegment, exit_code: int) -> bool:  # noqa: ARG002
        return exit_code in (0, EXIT_STOPPED)  # it may end by itself before it is stopped

    def traces(self, files: TrialFiles) -> dict[str, Path]:
        folders = sorted(files.run.iterdir()) if files.run.is_dir() else []
        found = {folder.name: RunFolder(folder).trace for folder in folders if RunFolder(folder).trace.exists()}
        return found or {trace.stem: trace for trace in sorted(files.rank_folder(1).glob("run-*.jsonl"))}


def run_trial(subject: VerifySubject, files: TrialFiles) -> TrialFailure | None:
    """Run a trial's segments one after another; return the failure if one fails."""
    for number, segment in enumerate(files.trial.segments, 1):
        variables = environment.verify_variables(subject.verify_request(segment, number, files))
        with files.log.open("wb") as output:
            code = run_to_end(subject.command(segment, files), variables, output)
        if not subject.is_expected_exit(segment, code):
            text = files.log.read_text(errors="replace").rstrip()
            is_own = code > 0 and code != EXIT_DIFFERENT  # negative: killed by a signal
            return TrialFailure(code if is_own else EXIT_FAILED, text[-_MAX_LOG_CHARS:])
    return None
