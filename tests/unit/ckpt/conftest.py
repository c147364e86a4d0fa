"""Run histories to audit."""

from pathlib import Path

import pytest

from tests.unit.ckpt.run_history import History


@pytest.fixture
def history(tmp_path: Path) -> History:
    return History(tmp_path)


@pytest.fixture
def finished(history: History) -> History:
    """Two and a half epochs of 20 samples in batches of 4, with a commit every 2 batches."""
    loaders = history.loaders(20, 4)
    for _ in range(6):
        history.consume(loaders, 2)
        history.commit()
    return history
