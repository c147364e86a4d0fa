"""Exceptions with a message for the user, and the exit codes of the commands.

A `LockstepError` is shown as its message alone, without a traceback, and ends the command with its exit code.
Any other exception is a bug, in lockstep or in the user's code, and keeps its traceback.
"""

import sys
from collections.abc import Sequence

from lockstep.terminal_text import escape_controls, print_line

EXIT_USER = 2  # a mistake that the user can correct
EXIT_FAILED = 3  # training failed
EXIT_DRIFT = 4  # could not resume without changing the result
EXIT_HANG = 5  # a hang was diagnosed
EXIT_DIFFERENT = 6  # `lockstep verify`: all runs ended, but not with the same result
EXIT_STOPPED = 75  # stopped on request, after a save: the same command continues


class LockstepError(Exception):
    """Base class of all errors that lockstep raises on purpose: catch it to handle any of them.

    The message is for a person: it names the value, the place and the remedy. `exit_code` is what a command that ends
    with this error returns.
    """

    exit_code = EXIT_FAILED

    def _render_traceback_(self) -> list[str]:
        """IPython calls this to display an error: a notebook, too, shows the message alone."""
        return _lines(self)


class UserError(LockstepError):
    """An argument, a setting, a file or the environment is wrong: correct what the message names and run again.

    Exit code 2.
    """

    exit_code = EXIT_USER


class Stopped(LockstepError):
    """The run was asked to stop before its end, as by Ctrl-C or SIGTERM, and has saved its state.

    Start the same command or script again to resume it. If you catch this, raise it again after your own clean-up, so
    that the process ends with exit code 75: stopped on request, resumable.
    """

    exit_code = EXIT_STOPPED


class ConfigError(UserError):
    """A config is wrong. `problems` lists everything that is wrong with it, one line each: place, key, remedy.

    Correct the lines of the file, or the overrides, that the message names.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class WorldError(UserError):
    """The processes of a job cannot form a process group.

    The launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR …) are missing or contradict each other, or the address
    cannot be reached. Set what the message names, or start the processes with `lockstep run -n N`.
    """


class RendezvousError(WorldError):
    """A machine of the job did not join in time.

    It may not have been started yet, or its network may block the port: check the machine that the message names, then
    start the job again. Exit code 3, so that a scheduler may retry.
    """

    exit_code = EXIT_FAILED


def exit_code_of_signal(number: int) -> int:
    """Return the exit code of a command that a signal ended, as a shell would: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + number


def print_error(error: LockstepError) -> int:
    """Print the error's message to standard error, each line after `lockstep: `; return its exit code."""
    for line in _lines(error):
        print_line(line, file=sys.stderr)
    return error.exit_code


def _lines(error: LockstepError) -> list[str]:
    return [f"lockstep: {line}" for line in escape_controls(error).splitlines()]
