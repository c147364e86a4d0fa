"""Checkpoints of every released format can still be read.

`python -m tests.contracts.test_checkpoint_formats FOLDER` wrote the files in tests/fixtures/checkpoints.
"""

import sys
from pathlib import Path
from typing import Any

import torch

from lockstep.checkpoint.checkpoint_contents import checkpoint_digest
from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.world.serialization import Shard
from tests.checkpoints import RUN_ID, save

FIXTURES = Path(__file__).parents[1] / "fixtures" / "checkpoints"

FACTS = {"position": {"step": 3, "batches": 4}, "metrics": {"loss": 0.1}, "events": None}


def parts_of_format_2() -> dict[str, Any]:
    weight = torch.arange(6.0).view(2, 3) / 7
    return {
        "model": {"weight": weight, "half": weight.bfloat16(), "count": torch.tensor(3)},
        "optimizer": {"state": {"weight": {"momentum": weight * 2, "step": torch.tensor(3.0)}}, "lr": 1e-3},
        "loader": {"epoch": 1, "position": (2, None)},
        "kept.other": {"shard": Shard(weight, (0, 0), (2, 3)), 5: [float("inf"), b"bytes", True], "$name": "é"},
    }


def test_format_2_loads_with_the_same_digest() -> None:
    found = CheckpointStore(FIXTURES / "format-2").load(3)
    assert found.manifest.run_id == RUN_ID
    assert found.manifest.facts == FACTS
    assert found.manifest.is_best
    assert checkpoint_digest(found.values) == "4316fe65553f507efc8759965a5a8a23da21319dc20126489095beac4b110ec7"
    expected = parts_of_format_2()
    expected["kept.other"]["shard"] = expected["kept.other"]["shard"].local
    assert checkpoint_digest(expected) == checkpoint_digest(found.values)
    assert found.values["loader"] == expected["loader"]
    assert torch.equal(found.values["kept.other"].pop("shard"), expected["kept.other"].pop("shard"))
    assert found.values["kept.other"] == expected["kept.other"]


if __name__ == "__main__":
    save(Path(sys.argv[1]), 3, parts_of_format_2(), FACTS, is_best=True)
