"""What is called before a process leaves its job: once, with how the block ended."""

import sys
from collections.abc import Callable

import pytest

from lockstep.launcher.exit_callbacks import Ending, call_at_exit, closing_at_exit, forget_at_exit


def endings_of(block: Callable[[], object]) -> list[Ending]:
    seen: list[Ending] = []
    with closing_at_exit():
        call_at_exit("kept", seen.append)
        call_at_exit("forgotten", seen.append)
        forget_at_exit("forgotten")
        block()
    return seen


def test_a_block_that_ends_normally() -> None:
    assert endings_of(lambda: None) == [Ending.NORMAL]


@pytest.mark.parametrize(("code", "ending"), [(0, Ending.NORMAL), (None, Ending.NORMAL), (3, Ending.FAILED)])
def test_a_block_that_exits(code: int | None, ending: Ending) -> None:
    seen: list[Ending] = []
    with pytest.raises(SystemExit), closing_at_exit():
        call_at_exit("kept", seen.append)
        sys.exit(code)
    assert seen == [ending]


def test_the_error_of_a_block_hides_those_of_its_callbacks() -> None:
    def fail(_ending: Ending) -> None:
        raise OSError("a victim")

    with pytest.raises(ValueError, match="the cause"), closing_at_exit():
        call_at_exit("kept", fail)
        raise ValueError("the cause")
    with pytest.raises(OSError, match="a victim"), closing_at_exit():
        call_at_exit("kept", fail)
