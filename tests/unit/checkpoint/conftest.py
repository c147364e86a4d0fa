"""A run folder with checkpoints."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from tests import checkpoints
from tests.unit.checkpoint.models import Save


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def save(run_folder: Path) -> Save:
    """Returns a function that commits a checkpoint: `save(3, model=model.state_dict(), is_best=True)`."""

    def commit(step: int, *, is_best: bool = False, **tensors: Mapping[str, Tensor]) -> Path:
        run_folder.mkdir(exist_ok=True)
        return checkpoints.save(run_folder / "checkpoints", step, tensors, is_best=is_best)

    return commit
