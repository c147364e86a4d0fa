"""A rank that leaves while it saves takes the group down; what it alone has written is not a checkpoint."""

from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.checkpoint.saver import Content, Saver
from lockstep.checkpoint.store import Retention, Store
from lockstep.testing import ranks
from lockstep.world.world import World


def save_after_leaving(world: World, folder: str) -> str | None:
    saver = Saver(Path(folder) / "checkpoints", world, "0" * 16, 0)
    parts = {"model": {"weight": torch.ones(3)}, "optimizer": {"moment": torch.ones(3)}}
    dist.destroy_process_group()
    saver.save(Content(1, parts, {}), Retention(3))
    outcome = saver.wait()
    assert outcome is not None and outcome.commit is None
    return outcome.problem


def test_a_rank_on_its_own_commits_nothing(tmp_path: Path) -> None:
    problems = ranks(2).run(save_after_leaving, str(tmp_path))
    assert all(problem is not None and "cannot be asked any more" in problem for problem in problems), problems
    assert not Store(tmp_path / "checkpoints").steps()
