"""Runs a script on several ranks and reads the reports that they print."""

import json
from pathlib import Path
from typing import Any

from tests.commands import LOCKSTEP, run


def rank_reports(folder: Path, text: str, size: int, backend: str) -> list[dict[str, Any]]:
    """Run a script with the arguments BACKEND and PATH; return what its ranks print as `report JSON`."""
    (folder / "script.py").write_text(text)
    path = str(folder / f"{backend}-{size}")
    finished = run([*LOCKSTEP, "run", "-n", str(size), "script.py", backend, path], folder, timeout_s=300)
    assert finished.code == 0, finished.err
    lines = [line for line in finished.out.splitlines() if line.startswith("report ")]
    return [json.loads(line.removeprefix("report ")) for line in lines]
