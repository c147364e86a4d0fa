"""Stop signals: SIGINT, SIGTERM and SIGHUP end the process at once, or after its current step where it can save itself.

[Note: held signals]

A signal handler must not raise while a module is being imported: the exception gets lost or leaves the module half
made, and where torch's C++ code calls Python it ends the process. So a stop signal that arrives during an import is
held, and looked at again a moment later until the import is over. An exception can get lost elsewhere too, in a
finalizer for example; such a request takes effect at the latest when the first step would begin.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lockstep.config import environment
from lockstep.supervision import heartbeat
from lockstep.terminal_text import print_line

# SIGHUP: the terminal has been closed.
STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

_LOOK_AGAIN_AFTER_S = 0.05


class StopRequested(BaseException):
    """Raised by a stop signal. Not a KeyboardInterrupt: the argument parser would swallow that."""

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(self.signal.name)


class _Request:
    """The first stop signal that the handlers of `install_stop_handlers` have received."""

    number: int | None = None
    is_held = False  # by our timer, which looks at it again


_request = _Request()


def install_stop_handlers() -> None:
    """Make stop signals raise `StopRequested` from now on, unless they are ignored; a second one ends the process."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup and shells' background jobs ignore some
            signal.signal(number, _on_stop_signal)


def remove_stop_handlers(interrupt: Callable[..., object] | signal.Handlers = signal.default_int_handler) -> None:
    """Let stop signals have their default effect again, where `install_stop_handlers` has changed that.

    A signal that is still held is forgotten. `interrupt` handles SIGINT.
    """
    _stop_looking_again()
    _request.number = None
    for number in STOP_SIGNALS:
        if signal.getsignal(number) is _on_stop_signal:
            signal.signal(number, interrupt if number == signal.SIGINT else signal.SIG_DFL)


def ignore_stop_signals() -> None:
    """Ignore stop signals from now on, except those that a script handles itself.

    For a run that has stopped and is saved: while Python ends, which takes a moment, a repeated request would change
    the exit code that says so.
    """
    if threading.current_thread() is threading.main_thread():
        for number in STOP_SIGNALS:
            if _is_default(signal.getsignal(number)):
                signal.signal(number, signal.SIG_IGN)


def obey_stop_request() -> None:
    """Raise `StopRequested` for a stop signal that is still held, or whose exception got lost. [Note: held signals]"""
    if _request.number is not None:
        _stop_looking_again()
        raise StopRequested(_request.number)


def is_importing(frame: FrameType | None) -> bool:
    """Is a module being imported in this frame or one of its callers?"""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


@contextmanager
def stop_after_step(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call `request_stop` on the first stop signal inside the `with` block; a second one acts as it did before.

    A user's own handlers are left alone. A rank under an agent treats any number of stop signals as one: the agent
    passes on those that it receives, and a scheduler may signal both. To kill a rank at once, signal the agent again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    obey_stop_request()
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
                # Not through rich's live bar: we may hold one of its locks, for which the thread that draws it waits.
                stream = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
                print_line(message, file=stream, flush=True)

    for number in replaced:
        signal.signal(number, on_stop_signal)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():  # another thread may close a generator
            restore_handlers()


def _is_default(handler: object) -> bool:
    return handler in (signal.SIG_DFL, signal.default_int_handler, _on_stop_signal)


def _on_stop_signal(number: int, frame: FrameType | None) -> None:
    if _request.number is None:
        _request.number = number
        _obey_after_imports(number, frame)
    elif environment.agent_pid() is None:  # a rank's agent ends it; a scheduler's second signal must not
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)


def _obey_after_imports(_: int, frame: FrameType | None) -> None:
    if not is_importing(frame):
        obey_stop_request()
    elif hasattr(signal, "setitimer"):  # elsewhere than on Windows, where the request waits for the first step
        _request.is_held = True
        signal.signal(signal.SIGALRM, _obey_after_imports)
        signal.setitimer(signal.ITIMER_REAL, _LOOK_AGAIN_AFTER_S)


def _stop_looking_again() -> None:
    """End our own timer, but none of a script or of whoever started this process (`alarm 60; exec …`)."""
    if _request.is_held:
        _request.is_held = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
