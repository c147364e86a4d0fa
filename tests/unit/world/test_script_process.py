"""What scripts without `launch` get: the same number of threads, once, and errors in one line."""

import logging
import sys
from collections.abc import Iterator

import pytest
import torch

from lockstep.errors import Stopped, UserError
from lockstep.world import script_process
from lockstep.world.script_process import choose_threads, choose_threads_once, prepare_script_process


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As at the start of a process; what a test changes is restored."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(script_process._thread_choice, "is_made", False)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def end_by(error: BaseException) -> int | None:
    """Return the exit code that an uncaught error gives; None if the hook does not decide it."""
    prepare_script_process()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code
    return None


def test_a_lockstep_error_is_one_line_and_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert end_by(UserError("lr=-1: expected more")) == 2
    assert end_by(Stopped("stopped after step 3")) == 75
    assert capsys.readouterr().err == "lockstep: lr=-1: expected more\nlockstep: stopped after step 3\n"


def test_other_errors_are_left_to_the_hook_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda _kind, error, _trace: seen.append(error))
    error = ValueError("planted")
    assert end_by(error) is None
    assert seen == [error]


def test_at_a_prompt_the_session_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    assert end_by(UserError("lr=-1")) is None
    assert capsys.readouterr().err == "lockstep: lr=-1\n"


def test_threads_are_chosen_once_and_said(caplog: pytest.LogCaptureFixture) -> None:
    torch.set_num_threads(3)
    with caplog.at_level(logging.WARNING, logger="lockstep"):
        choose_threads_once(is_main=True)
        assert torch.get_num_threads() == 1
        torch.set_num_threads(2)  # the script's choice, which a Run made later must keep
        choose_threads_once(is_main=True)
    assert torch.get_num_threads() == 2
    assert [record.getMessage()[:36] for record in caplog.records] == ["computing with 1 thread instead of 3"]


def test_the_users_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    choose_threads_once(is_main=True)
    assert torch.get_num_threads() == 2


def test_a_number_that_was_chosen_stays() -> None:
    choose_threads(2)
    choose_threads_once(is_main=True)
    assert torch.get_num_threads() == 2
