"""SIGINT and SIGTERM: end the process at once, or after its current step where it can save itself."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from lockstep.config import environment
from lockstep.supervision import heartbeat

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(BaseException):
    """Raised by a stop signal. Not a KeyboardInterrupt: the argument parser would swallow that."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)


def install_stop_handlers() -> None:
    """Make stop signals raise `StopRequested` from now on, unless they are ignored."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # shells start background jobs with SIGINT ignored
            signal.signal(number, _raise_stop_requested)


@contextmanager
def stop_after_step(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call `request_stop` on the first stop signal inside the `with` block; a second one acts as it did before.

    A user's own handlers are left alone. A rank under an agent treats any number of stop signals as one: the agent
    passes on those that it receives, and a scheduler may signal both. To kill a rank at once, signal the agent again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    replaced = {number: handler for number, handler in before.items() if _is_default(handler)}
    is_supervised = environment.agent_pid() is not None

    def restore_handlers() -> None:
        for number, handler in replaced.items():
            if signal.getsignal(number) is on_stop_signal:
                signal.signal(number, handler)

    def on_stop_signal(number: int, _frame: object) -> None:
        request_stop()
        heartbeat.mark_stopping()
        if not is_supervised:  # an agent has already printed its own message
            restore_handlers()
            name = signal.Signals(number).name
            # The signal may have interrupted another print, and Ctrl-C also ends a `| tee`: the step must continue.
            with suppress(OSError, ValueError, RuntimeError):
                message = f"lockstep: stopping after this step ({name}); signal again to end at once"
                print(message, file=sys.stderr, flush=True)

    for number in replaced:
        signal.signal(number, on_stop_signal)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # another thread may close a generator
            restore_handlers()


def _is_default(handler: object) -> bool:
    return handler in (signal.SIG_DFL, signal.default_int_handler, _raise_stop_requested)


def _raise_stop_requested(number: int, _frame: object) -> NoReturn:
    raise StopRequested(number)
