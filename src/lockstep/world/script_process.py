"""What holds in every process that trains, with and without `launch`: its threads, its output, errors in one line.

[Note: one contract]

A script gives the same bits and ends in the same way however it is started: by `lockstep run`, by `launch`, or by
`python` alone, where it calls `setup_distributed` or makes a `Run` itself. So each of these ways computes with the same
number of threads, which changes bits, goes on if its output cannot be written, and shows a `LockstepError` as one line
and its exit code.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

import torch
import torch.distributed as dist

from lockstep.config import environment
from lockstep.config.plurals import count_noun
from lockstep.errors import LockstepError, Stopped, print_error
from lockstep.launcher.exit_callbacks import close_after_failure
from lockstep.supervision.output_streams import keep_failing_streams
from lockstep.supervision.stop_signals import ignore_stop_signals

logger = logging.getLogger("lockstep")

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _ThreadChoice:
    """Whether the number of threads was chosen in this process. The script may change it afterwards."""

    is_made = False


_thread_choice = _ThreadChoice()


def choose_threads(number: int | None = None) -> None:
    """Compute with this many threads; by default with OMP_NUM_THREADS, or with one, as everywhere."""
    torch.set_num_threads(environment.threads_per_process() if number is None else number)
    _thread_choice.is_made = True


def choose_threads_once(*, is_main: bool) -> None:
    """Choose the number of threads, unless that was done before, and say so, because torch alone would not do it."""
    if _thread_choice.is_made:
        return
    before = torch.get_num_threads()
    choose_threads()
    now = torch.get_num_threads()
    if now != before and is_main:
        logger.warning(
            "computing with %s instead of %d, as under `lockstep run`, for the same bits: for more, set "
            "OMP_NUM_THREADS, or call torch.set_num_threads after this",
            count_noun(now, "thread"),
            before,
        )


def prepare_script_process() -> None:
    """From now on, let no write to standard output or error fail, and show an uncaught `LockstepError` in one line."""
    keep_failing_streams()
    if not isinstance(sys.excepthook, _OneLineHook):
        sys.excepthook = _OneLineHook(sys.excepthook)


class _OneLineHook:
    """An `excepthook` that leaves all other exceptions to the one before it, and closes open runs after any."""

    def __init__(self, before: _Hook) -> None:
        self._before = before

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, LockstepError):
            self._before(kind, error, trace)
            if not is_interactive():
                close_after_failure()
            return
        code = print_error(error)
        if is_interactive():
            return
        if isinstance(error, Stopped):
            ignore_stop_signals()
        close_after_failure()
        with suppress(Exception):  # it is not the cause
            if dist.is_initialized():
                dist.destroy_process_group()
        sys.exit(code)  # Python ends with this code, as it does for a SystemExit elsewhere


def is_interactive() -> bool:
    """Is this a prompt or a notebook? There errors are raised: ending the process would end the user's session."""
    return hasattr(sys, "ps1")
