"""A job for a scheduler: the machines it needs and the command that each one runs, checked before it is queued."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from lockstep.command_line.launch_options import check_launch_options, read_nproc
from lockstep.errors import EXIT_STOPPED, UserError, exit_code_of_signal

if TYPE_CHECKING:
    from lockstep.config.job_schema import JobConfig

_MARGIN_S = 15  # from the end of the grace period to the kill: time for the agent to end and the job to be requeued
_MIN_NOTICE_S = 2 * _MARGIN_S
_MAX_NOTICE_S = 65535  # a limit of Slurm
# Parameters of `launch_options` that the scheduler determines.
_SET_BY_THE_SCHEDULER = ("nnodes", "node_rank", "master_addr", "master_port", "rdzv_endpoint")


class MemoryRequest(NamedTuple):
    """Memory of one machine; units are powers of 1024."""

    amount: int
    unit: str  # M, G or T


@dataclass(frozen=True)
class Machines:
    """The machines of a job, all alike."""

    count: int
    nproc: str  # processes on each machine, in the form of the option `-n`
    num_processes: int  # maximum, over all machines
    cpus: int
    gpus: int | None = None
    memory: MemoryRequest | None = None


class SubmittedCommand(NamedTuple):
    """The command that each machine runs, as the user gave it."""

    words: tuple[str, ...]
    title: str  # the name of the recipe, or of the config's or script's file
    grace_s: float | None  # its --grace, if given


@dataclass(frozen=True)
class JobRequest:
    """A job, for any scheduler."""

    name: str
    command: SubmittedCommand
    machines: Machines
    stop_before_s: int  # from SIGTERM to the kill
    setup: str | None = None  # shell

    @property
    def codes_to_start_again(self) -> list[int]:
        """The exit codes after which the same command is to be started again.

        `train` can also be stopped before it has anything to save, and then starts over; a script may not be able to.
        """
        stopped_early = [exit_code_of_signal(signal.SIGTERM)] if self.command.words[0] == "train" else []
        return [EXIT_STOPPED, *stopped_early]

    def command_line(self, *placement: str) -> list[str]:
        """Return the full command of a machine. Our options come first: a script's arguments must be at the end."""
        name, *arguments = self.command.words
        grace = ["--grace", str(self.stop_before_s - _MARGIN_S)] if self.command.grace_s is None else []
        return ["lockstep", name, "-n", self.machines.nproc, *placement, *grace, *arguments]


def read_machines(count: int, nproc: str | None, gpus: int | None, cpus: int | None, memory: str | None) -> Machines:
    """Read the options that describe the machines, and fill in defaults."""
    processes = str(gpus or 1) if nproc is None else nproc
    most, least = read_nproc(processes)
    if most == "auto":
        raise UserError("-n auto: a scheduler needs a number; omit -n for one process per GPU")
    if most < 1 or (least is not None and not 1 <= least <= most):
        raise UserError(f"-n {processes[:60]!r}: expected at least 1, or a minimum and a maximum, as in 2:4")
    return Machines(count, processes, count * most, cpus or most, gpus, None if memory is None else read_memory(memory))


def read_memory(text: str) -> MemoryRequest:
    """Read the option --memory."""
    found = re.fullmatch(r"([1-9]\d{0,8})([MGT])(?:i?B)?", text)
    if found is None:
        raise UserError(f"--memory {text[:60]!r}: expected a size with a unit, M, G or T, as in 64G")
    return MemoryRequest(int(found[1]), found[2])


def read_time(text: str) -> int:
    """Read a time in any of Slurm's formats and return seconds: 90 (minutes), 90:00, 24:00:00, 2-12, 2-12:30:00."""
    found = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,8})(?::(\d{1,8}))?(?::(\d{1,8}))?", text, re.ASCII)
    days, *rest = found.groups() if found else (None, None)
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, (*parts, 0, 0)[:2]
    total = ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
    if total == 0:
        raise UserError(
            f"--time {text[:60]!r}: expected hours:minutes:seconds, as in 24:00:00, or days-hours, as in 2-12"
        )
    return total


def check_notice(stop_before_s: int, time_s: int | None = None) -> None:
    """Check that there is enough time to save, and to train before that."""
    if not _MIN_NOTICE_S <= stop_before_s <= _MAX_NOTICE_S:
        raise UserError(f"--stop-before {stop_before_s}: expected {_MIN_NOTICE_S} to {_MAX_NOTICE_S} seconds")
    if time_s is not None and time_s <= stop_before_s:
        raise UserError(
            f"--stop-before {stop_before_s}: the job has only {time_s} s (--time), which leaves no time to train"
        )


def check_setup(text: str | None) -> None:
    """Check the option --setup."""
    if text is not None and ("\0" in text or not text.strip()):
        raise UserError("--setup: expected a line of shell, as in 'source .venv/bin/activate'")


def check_grace(grace_s: float | None, stop_before_s: int) -> None:
    """Check the --grace of the command, if it has one, against --stop-before."""
    if grace_s is not None and not 0 <= grace_s <= stop_before_s - _MARGIN_S:
        raise UserError(
            f"--grace {grace_s:g}: expected 0 to {stop_before_s - _MARGIN_S}, since the job is killed "
            f"{stop_before_s} s after it is asked to stop (--stop-before)"
        )


def read_command(context: typer.Context, words: Sequence[str], machines: Machines) -> SubmittedCommand:
    """Check a `train …` or `run …` command as if it were to start now on these machines; return it."""
    if not words or words[0] not in ("train", "run"):
        found = f"{words[0][:60]!r}" if words else "nothing"
        raise UserError(f"expected a train … or run … command, and got {found}: lockstep submit … -- train mine.yaml")
    parsed = _parse(context, words)
    given = {name: parsed.params[name] for name in parsed.params if _is_given(parsed, name)}
    _refuse_options(given)
    check_launch_options(machines.nproc, parsed.params)
    if words[0] == "train":
        _check_training(given, machines.num_processes)
        subject = given["config"]
    else:
        _check_script(given)
        subject = given["script"]
    return SubmittedCommand(tuple(words), Path(subject).stem, given.get("grace_s"))


def _parse(context: typer.Context, words: Sequence[str]) -> Any:
    """Parse the words as the command itself would; its own usage errors are raised."""
    root = context.find_root()
    group: Any = root.command
    name, *arguments = words
    return group.commands[name].make_context(name, arguments, parent=root)


def _is_given(parsed: Any, name: str) -> bool:
    return bool(parsed.get_parameter_source(name).name == "COMMANDLINE")


def _refuse_options(given: dict[str, Any]) -> None:
    if "nproc" in given:
        raise UserError(
            f"-n {given['nproc']} is after the command: put it before, lockstep submit … -n {given['nproc']} -- …"
        )
    for name in _SET_BY_THE_SCHEDULER:
        if name in given:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} {given[name]}: the scheduler places the machines; omit {option}")
    if "stop_after" in given:
        raise UserError(
            f"--stop-after {given['stop_after']} ends with exit code {EXIT_STOPPED}, which makes the scheduler start "
            "the job again: set steps=… instead"
        )


def _check_training(given: dict[str, Any], processes: int) -> None:
    """Check the config as `lockstep train` does, and that there is a lane for every process."""
    from lockstep.loggers.logger_factory import check_extras
    from lockstep.recipes.registry import load_recipe

    changes = [*(given.get("overrides") or []), *(["quick=true"] if given.get("quick") else [])]
    _, settings = load_recipe(given["config"], changes)
    check_extras(settings.log)
    _check_lanes(settings, processes)


def _check_lanes(settings: "JobConfig", processes: int) -> None:
    from lockstep.config.train_schema import Config
    from lockstep.data.lanes import choose_lanes, share_lanes

    # With a batch per device, the number of lanes follows the processes; a mesh shares lanes over one axis only.
    if isinstance(settings, Config) and settings.batch.global_batch is not None and isinstance(settings.parallel, str):
        lanes = choose_lanes(settings.batch.global_batch) if settings.lanes == "auto" else settings.lanes
        share_lanes(lanes, processes, settings.lanes_per_rank)


def _check_script(given: dict[str, Any]) -> None:
    from lockstep.launcher.launch_plan import check_target

    check_target([*(["-m"] if given.get("module") else []), given["script"]])
