"""The fixture that writes a config file."""

from pathlib import Path

import pytest

from tests.unit.config.config_problems import Write


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes `run.yaml` into an empty current folder, so that messages name it by that name alone."""
    monkeypatch.chdir(tmp_path)

    def write_file(content: str | bytes, name: str = "run.yaml") -> Path:
        path = Path(name)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file
