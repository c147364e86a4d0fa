"""What is closed before a process leaves its job: runs, which save what is due while the other ranks still answer."""

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum

Key = object


class Ending(Enum):
    """How a process comes to its end."""

    NORMAL = "main returned"
    FAILED = "an exception was raised"
    OUTSIDE = "Python ends a script that nothing of lockstep has run"  # too late for threads, and for other ranks


class _Callbacks:
    """What to call at the end of this process, by what registered it."""

    def __init__(self) -> None:
        self.by_key: dict[Key, Callable[[Ending], None]] = {}
        self.num_blocks = 0  # of `closing_at_exit` that are entered
        self.is_registered = False  # with `atexit`

    def call(self, ending: Ending) -> None:
        while self.by_key:
            _, callback = self.by_key.popitem()
            callback(ending)


_callbacks = _Callbacks()


def call_at_exit(key: Key, callback: Callable[[Ending], None]) -> None:
    """Call this before the process leaves its job, unless `forget_at_exit(key)` comes first."""
    _callbacks.by_key[key] = callback
    if not _callbacks.is_registered and not _callbacks.num_blocks:
        _callbacks.is_registered = True
        atexit.register(_call_outside)


def forget_at_exit(key: Key) -> None:
    """Do not call what was registered under this key."""
    _callbacks.by_key.pop(key, None)


def close_after_failure() -> None:
    """Call what was registered, because the script has raised an exception that nobody catches."""
    with suppress(Exception):  # it is not the cause
        _callbacks.call(Ending.FAILED)


def _call_outside() -> None:
    with suppress(Exception):  # nobody is left to handle it
        _callbacks.call(Ending.OUTSIDE)


@contextmanager
def closing_at_exit() -> Iterator[None]:
    """At the end of the block, call what was registered in it. If it fails, suppress their errors."""
    _callbacks.num_blocks += 1
    try:
        try:
            yield
        except SystemExit as end:
            if end.code in (None, 0):
                _callbacks.call(Ending.NORMAL)
            raise
        _callbacks.call(Ending.NORMAL)
    except BaseException:
        close_after_failure()
        raise
    finally:
        _callbacks.num_blocks -= 1
