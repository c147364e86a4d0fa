"""A valid config to start from, and the lines of the error that a wrong one raises."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from pydantic import BaseModel

from lockstep.config.config_file import read_config
from lockstep.config.train_schema import Config
from lockstep.errors import ConfigError

VALID = "recipe: digits\nepochs: 3\nbatch: {global: 64}\n"  # the keys that a config must have, on three lines

Write = Callable[..., Path]  # the fixture `write`


def problems_of(path: Path, overrides: Iterable[str] = (), schema: type[BaseModel] = Config) -> list[str]:
    """Return all lines of the one error that loading raises."""
    with pytest.raises(ConfigError) as caught:
        read_config(path, overrides).check(schema)
    problems = list(caught.value.problems)
    assert all(len(problem.splitlines()) == 1 and problem.isprintable() for problem in problems)
    return problems
