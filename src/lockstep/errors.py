"""Everything lockstep says to its user on purpose.

A `LockstepError` is shown as its message alone, without a traceback, and ends the command with its exit code.
Anything else that is raised is a defect, in lockstep or in the user's code, and keeps its traceback.
"""

import sys
from collections.abc import Sequence

EXIT_USER = 2  # the user's mistake
EXIT_FAILED = 3  # training failed
EXIT_DRIFT = 4  # could not resume without changing the answer
EXIT_HANG = 5  # a hang was diagnosed
EXIT_STOPPED = 75  # stopped on request


class LockstepError(Exception):
    """Base of all deliberate errors; `exit_code` is what the command returns."""

    exit_code = EXIT_FAILED

    def _render_traceback_(self) -> list[str]:
        """What IPython asks an error for: in a notebook, too, it is shown as its message alone."""
        return _lines(self)


class UserError(LockstepError):
    """Something the user can put right before anything has started."""

    exit_code = EXIT_USER


class Stopped(LockstepError):
    """The run was asked to end before its end; it is saved, and goes on when it is started again."""

    exit_code = EXIT_STOPPED


class ConfigError(UserError):
    """One or more faults in a config, all found at once; one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class WorldError(UserError):
    """The launcher's variables are missing or contradict each other, or the processes cannot meet."""


class MeetingError(WorldError):
    """A machine did not come in time. Perhaps it had to wait for room: another try may meet it."""

    exit_code = EXIT_FAILED


def complain(error: LockstepError) -> int:
    """Say a deliberate error as it is meant to be said; return the exit code that goes with it."""
    for line in _lines(error):
        print(line, file=sys.stderr)
    return error.exit_code


def _lines(error: LockstepError) -> list[str]:
    return [f"lockstep: {line}" for line in str(error).splitlines()]
