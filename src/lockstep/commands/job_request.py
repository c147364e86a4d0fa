"""What is asked of a scheduler: so many machines, so much of each, and the command that every one of them runs."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.commands.launching import read_nproc
from lockstep.commands.submitted import Submitted
from lockstep.errors import UserError

_MARGIN_S = 15  # from the end of the grace period to the kill: for an agent to end, and a job to be queued again
_LEAST_NOTICE_S = 2 * _MARGIN_S
_MOST_NOTICE_S = 65535  # that Slurm knows of


class Memory(NamedTuple):
    """Of one machine; units are powers of 1024."""

    amount: int
    unit: str  # M, G or T


@dataclass(frozen=True)
class Machines:
    """How many of which."""

    count: int
    nproc: str  # on each, as `-n` has it
    num_processes: int  # on all, at most
    cpus: int
    gpus: int | None = None
    memory: Memory | None = None


@dataclass(frozen=True)
class JobRequest:
    """A job, whichever scheduler it is for."""

    name: str
    submitted: Submitted
    machines: Machines
    stop_before_s: int  # from SIGTERM to the kill
    setup: str | None = None  # shell

    def words(self, *placement: str) -> list[str]:
        """The whole command of a machine. What we add comes first: a script's own arguments stand at the end."""
        name, *arguments = self.submitted.words
        grace = ["--grace", str(self.stop_before_s - _MARGIN_S)] if self.submitted.grace_s is None else []
        return ["lockstep", name, "-n", self.machines.nproc, *placement, *grace, *arguments]


def read_machines(count: int, nproc: str | None, gpus: int | None, cpus: int | None, memory: str | None) -> Machines:
    processes = str(gpus or 1) if nproc is None else nproc
    most, least = read_nproc(processes)
    if most == "auto":
        raise UserError("-n auto: a scheduler must be told how many; leave -n away for one per GPU")
    if most < 1 or (least is not None and not 1 <= least <= most):
        raise UserError(f"-n {processes[:60]!r}: expected at least 1, or the fewest and the most, as in 2:4")
    return Machines(count, processes, count * most, cpus or most, gpus, None if memory is None else read_memory(memory))


def read_memory(text: str) -> Memory:
    found = re.fullmatch(r"([1-9]\d{0,8})([MGT])(?:i?B)?", text)
    if found is None:
        raise UserError(f"--memory {text[:60]!r}: expected a size with its unit, M, G or T, as in 64G")
    return Memory(int(found[1]), found[2])


def read_time(text: str) -> int:
    """Slurm's ways to say a time, in seconds: 90 (minutes), 90:00, 24:00:00, 2-12, 2-12:30, 2-12:30:00."""
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
    """Is there time to save, and to train before that?"""
    if not _LEAST_NOTICE_S <= stop_before_s <= _MOST_NOTICE_S:
        raise UserError(f"--stop-before {stop_before_s}: expected {_LEAST_NOTICE_S} to {_MOST_NOTICE_S} seconds")
    if time_s is not None and time_s <= stop_before_s:
        raise UserError(f"--stop-before {stop_before_s}: the job has {time_s} s in all (--time): no time to train in")


def check_setup(text: str | None) -> None:
    if text is not None and ("\0" in text or not text.strip()):
        raise UserError("--setup: expected a line of shell, as in 'source .venv/bin/activate'")


def check_grace(grace_s: float | None, stop_before_s: int) -> None:
    """Of a command that says it itself."""
    if grace_s is not None and not 0 <= grace_s <= stop_before_s - _MARGIN_S:
        raise UserError(
            f"--grace {grace_s:g}: expected 0 to {stop_before_s - _MARGIN_S}, since the job is killed "
            f"{stop_before_s} s after it is asked to stop (--stop-before)"
        )
