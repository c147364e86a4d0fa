"""Fixtures for every test: it leaves nothing behind, and the processes that it starts receive Ctrl-C."""

import shutil
import signal

from tests.commands import memory
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
    """Handle SIGINT even if pytest was started with it ignored, as background jobs are: child processes inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    """Remove the shared memory of killed agents. Not with `atexit`, which xdist's workers skip."""
    shutil.rmtree(memory(), ignore_errors=True)
