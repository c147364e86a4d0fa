"""Errors of `launch`: a script prints a line and exits; at a prompt or in a notebook they are raised."""

import sys
from types import ModuleType

import pytest

from lockstep.errors import UserError
from lockstep.recipes.search_pipeline import main_distributed
from lockstep.world.launch import launch
from lockstep.world.world import World


def mistaken(_: World) -> None:
    raise UserError("data.path: no such file\nand another line")


@pytest.fixture
def no_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))


@pytest.fixture
def prompt(no_script: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)


def test_a_script_prints_only_the_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        launch(mistaken)
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines() == ["lockstep: data.path: no such file", "lockstep: and another line"]


def test_at_a_prompt_the_error_is_raised(prompt: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no such file") as caught:
        launch(mistaken)
    assert capsys.readouterr().err == "", "the prompt itself prints the error"
    assert caught.value._render_traceback_() == ["lockstep: data.path: no such file", "lockstep: and another line"]


def test_several_processes_need_a_script(no_script: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        launch(mistaken, nproc=2)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "put main into a file and run `!lockstep run -n 2 FILE.py`, or omit nproc" in line


def test_several_processes_at_a_prompt_raise(prompt: None) -> None:
    with pytest.raises(UserError, match="starts copies of a script, and this is a notebook or a prompt"):
        launch(mistaken, nproc=2)


def test_at_a_prompt_a_search_raises_too(prompt: None) -> None:
    with pytest.raises(UserError, match="--nproc-per-node 0: expected at least 1"):
        main_distributed("wing", world_size=0)
