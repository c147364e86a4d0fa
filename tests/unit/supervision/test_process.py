"""What the kernel says of a process is read, whatever that process calls itself."""

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.supervision.process import children_of, state_of
from lockstep.supervision.stacks import _would_hear

_PR_SET_NAME = 15


@pytest.fixture
def half_a_letter() -> Iterator[None]:
    """The kernel keeps the first 15 bytes of a name."""
    before = Path("/proc/self/comm").read_bytes().strip()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, "обработка данных".encode())
    yield
    ctypes.CDLL(None).prctl(_PR_SET_NAME, before)


@pytest.mark.usefixtures("half_a_letter")
def test_a_name_that_was_cut_in_a_letter() -> None:
    state = state_of(os.getpid())
    assert state is not None
    assert state.name.startswith("обработ")
    assert os.getpid() in children_of(os.getppid())
    assert not _would_hear(os.getpid())
