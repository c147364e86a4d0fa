"""What holds for every test: it leaves nothing behind."""

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
