"""How a job ended that was asked to stop: can the same command continue it, and what is the exit code?"""

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lockstep.errors import EXIT_STOPPED, exit_code_of_signal
from lockstep.events.run_folder import RunFolder
from lockstep.supervision.failure_report import RankExit


class StopOutcome(NamedTuple):
    """The end of a job that was asked to stop."""

    exit_code: int
    message: str  # to be printed


def judge_stop(request: signal.Signals, exits: Sequence[RankExit], run_folder: Path | None) -> StopOutcome:
    """Say how a job ended after a stop request. With code 75 it can be continued: a scheduler may rely on that.

    Args:
        request: the signal by which it was asked.
        exits: how the ranks of this machine ended; none if they had not been started.
        run_folder: the folder of the job's run, if it has opened one.
    """
    for end in exits:
        if end.report is not None and end.report.exit_code == EXIT_STOPPED:
            return StopOutcome(EXIT_STOPPED, end.report.error.partition(": ")[2])
    stopped = f"stopped on request ({request.name})"
    if run_folder is not None and RunFolder(run_folder).has_checkpoint():
        return StopOutcome(EXIT_STOPPED, describe_resumable_stop(request, run_folder))
    codes = {end.exit_code for end in exits}
    if codes in ({0}, {EXIT_STOPPED}):  # a script with a signal handler of its own, or one that was about to end
        return StopOutcome(codes.pop() or 0, f"{stopped}: the script handled it and ended by itself")
    return StopOutcome(exit_code_of_signal(request), f"{stopped}: no checkpoint of a run to continue from")


def describe_resumable_stop(request: signal.Signals, run_folder: Path) -> str:
    """Say that a run was stopped where it could not save, though it had saved before."""
    return (
        f"stopped on request ({request.name}): run the same command again to continue from the newest checkpoint in "
        f"{run_folder}"
    )
