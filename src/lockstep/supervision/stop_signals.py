"""SIGINT and SIGTERM: somebody wants this process to end. At once, or after its step where it can save itself."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from lockstep.config import environment
from lockstep.supervision import pulse

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(BaseException):
    """Raised by a stop signal. Not a KeyboardInterrupt: the argument parser would swallow that."""


def raise_when_asked_to_stop() -> None:
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as shells' background jobs want it
            signal.signal(number, _raise)


@contextmanager
def stops_after_the_step(ask: Callable[[], None]) -> Iterator[None]:
    """Inside, the first stop signal calls `ask`, and the second acts as it did before. A user's own handler stays.

    A rank under an agent takes any number of them for one: its agent passes on what it gets, and a scheduler may signal
    both. Who is impatient tells the agent.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    usual = {number: handler for number, handler in before.items() if _is_usual(handler)}

    is_supervised = environment.agent_pid() is not None

    def give_back() -> None:
        for number, handler in usual.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)

    def note(number: int, _frame: object) -> None:
        ask()
        pulse.promise_to_stop()
        if not is_supervised:  # else the agent has said it
            give_back()
            name = signal.Signals(number).name
            # It may have interrupted another print, and Ctrl-C ends a `| tee` as well: the step goes on all the same.
            with suppress(OSError, ValueError, RuntimeError):
                print(
                    f"lockstep: stopping after this step ({name}); once more to end at once",
                    file=sys.stderr,
                    flush=True,
                )

    for number in usual:
        signal.signal(number, note)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # a generator may be ended by another
            give_back()


def _is_usual(handler: object) -> bool:
    return handler in (signal.SIG_DFL, signal.default_int_handler, _raise)


def _raise(number: int, _frame: object) -> NoReturn:
    raise StopRequested(signal.Signals(number).name)
