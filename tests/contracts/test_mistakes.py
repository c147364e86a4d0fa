"""Natural mistakes, through the real commands: each is answered by its exit code and one line, or simply works."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.commands import LOCKSTEP, Finished, run
from tests.contracts.mistakes import (
    compiled_models,
    hangs,
    launching,
    losses,
    settings,
    streams,
    trainer,
    training_loop,
    verify,
)
from tests.contracts.mistakes.mistake import Mistake, as_parameters

TABLES = [training_loop, losses, trainer, compiled_models, streams, settings, launching, hangs, verify]
MISTAKES = [mistake for table in TABLES for mistake in table.MISTAKES]


@pytest.mark.parametrize("mistake", as_parameters(MISTAKES))
def test_is_answered_in_one_line(mistake: Mistake, tmp_path: Path) -> None:
    finished = make(mistake, tmp_path)
    shown = finished.out + finished.err
    assert finished.code == mistake.code, shown
    lines = {line.strip() for line in shown.splitlines() if re.search(mistake.says, line)}
    assert len(lines) == 1, shown
    assert ("Traceback" in shown) == mistake.shows_traceback, shown


def test_every_row_has_a_name_of_its_own() -> None:
    names = [mistake.name for mistake in MISTAKES]
    assert len(set(names)) == len(names)


def make(mistake: Mistake, folder: Path) -> Finished:
    """Make the mistake, in this folder."""
    for name, text in {"train.py": mistake.script, **mistake.files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    program, *arguments = shlex.split(mistake.command)
    command = {"lockstep": LOCKSTEP, "python": [sys.executable]}[program]
    return run([*command, *arguments], folder, dict(mistake.env), timeout_s=mistake.timeout_s)
