"""A rank that exits during a save destroys the process group; its files alone are not committed as a checkpoint."""

from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.checkpoint.async_saver import SaveContent, Saver
from lockstep.checkpoint.checkpoint_store import CheckpointStore, Retention
from lockstep.testing import ranks
from lockstep.world.world import World


def save_without_group(world: World, folder: str) -> str | None:
    saver = Saver(Path(folder) / "checkpoints", world, "0" * 16, 0)
    parts = {"model": {"weight": torch.ones(3)}, "optimizer": {"moment": torch.ones(3)}}
    dist.destroy_process_group()
    saver.save(SaveContent(1, parts, {}), Retention(3))
    outcome = saver.wait()
    assert outcome is not None and outcome.commit is None
    return outcome.problem


def test_a_rank_that_cannot_reach_the_others_commits_nothing(tmp_path: Path) -> None:
    problems = ranks(2).run(save_without_group, str(tmp_path))
    assert all(problem is not None and "can no longer be reached" in problem for problem in problems), problems
    assert not CheckpointStore(tmp_path / "checkpoints").steps()
