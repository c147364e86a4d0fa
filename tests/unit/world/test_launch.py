"""Errors of `launch`: a script ends with a line and a code; a prompt or a notebook goes on."""

import sys
from types import ModuleType

import pytest

from lockstep.errors import UserError
from lockstep.recipes.pipeline import main_distributed
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


def test_a_script_ends_with_the_message_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        launch(mistaken)
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines() == ["lockstep: data.path: no such file", "lockstep: and another line"]


def test_a_prompt_lives_on(prompt: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no such file") as caught:
        launch(mistaken)
    assert capsys.readouterr().err == "", "the prompt shows it"
    assert caught.value._render_traceback_() == ["lockstep: data.path: no such file", "lockstep: and another line"]


def test_several_processes_need_a_script(no_script: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        launch(mistaken, nproc=2)
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "put main into a file and start that, `!lockstep run -n 2 FILE.py`, or leave nproc away" in line


def test_several_processes_need_a_script_at_a_prompt_too(prompt: None) -> None:
    with pytest.raises(UserError, match="starts copies of a script, and a notebook or a prompt is none"):
        launch(mistaken, nproc=2)


def test_a_search_leaves_a_prompt_alive_too(prompt: None) -> None:
    with pytest.raises(UserError, match="--nproc-per-node 0: expected at least 1"):
        main_distributed("wing", world_size=0)
