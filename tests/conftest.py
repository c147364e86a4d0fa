"""What holds for every test: it leaves nothing behind, and what it starts hears Ctrl-C."""

import signal

from tests.leaks import (
    no_worker_outlives_the_session,
    nothing_is_left_behind,
    pytest_sessionfinish,
    pytest_sessionstart,
)

__all__ = [
    "no_worker_outlives_the_session",
    "nothing_is_left_behind",
    "pytest_sessionfinish",
    "pytest_sessionstart",
]


def pytest_configure() -> None:
    """Where the tests themselves were started to ignore it, as a shell's background jobs are, their children would."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
