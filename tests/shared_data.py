"""Real data that does not come with the repository: a test that needs it is skipped where it is absent."""

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "shared" / "data"  # beside the checkout


def shared_data(name: str) -> Path:
    path = FOLDER / name
    if not path.exists():
        pytest.skip(f"{name} is not in {FOLDER}")
    return path
