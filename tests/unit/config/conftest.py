"""A config file to write, and what is wrong with one."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from pydantic import BaseModel

from lockstep.config.draft import read
from lockstep.config.schema import Config
from lockstep.errors import ConfigError

VALID = "recipe: digits\nepochs: 3\nbatch: {global: 64}\n"  # the keys that a config must have, on three lines


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str | bytes], Path]:
    """Writes `run.yaml` into an empty current folder, so that messages name it by that name alone."""
    monkeypatch.chdir(tmp_path)

    def write_file(content: str | bytes, name: str = "run.yaml") -> Path:
        path = Path(name)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def problems_of(path: Path, overrides: Iterable[str] = (), schema: type[BaseModel] = Config) -> list[str]:
    """All lines of the one error that loading raises."""
    with pytest.raises(ConfigError) as caught:
        read(path, overrides).check(schema)
    problems = list(caught.value.problems)
    assert all(len(problem.splitlines()) == 1 and problem.isprintable() for problem in problems)
    return problems
