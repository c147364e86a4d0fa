"""Loops that the script leaves early: what was made is saved, the run is closed, and the same command goes on."""

from pathlib import Path

import pytest

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.events.jsonl import read_jsonl
from tests.commands import LOCKSTEP, Finished, run

SCRIPT = """
import sys
import lockstep, torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])

def main(world):
    run = lockstep.Run(sys.argv[1], world, seed=3)
    model = run.prepare(nn.Linear(8, 3))
    optimizer = run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    for step in run.steps(run.loader(data, 16, lanes=4), steps=12, save_every=5):
        step.accumulate(loss, model)
        step.update(optimizer)
        if step.number == 7:
            LEAVE

lockstep.launch(main)
"""


def train(folder: Path, leave: str, processes: int) -> Finished:
    (folder / "train.py").write_text(SCRIPT.replace("LEAVE", leave))
    return run([*LOCKSTEP, "run", "-n", str(processes), "train.py", "runs/mine"], folder)


def digest_in(folder: Path) -> str:
    (end,) = [event for event in read_jsonl(folder / "runs/mine/events.jsonl") if event["kind"] == "end"]
    return str(end["digest"])


def steps_saved(folder: Path) -> list[int]:
    return sorted(CheckpointStore(folder / "runs/mine/checkpoints").steps())


@pytest.fixture(scope="module")
def digest(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    assert train(folder, "pass", 1).code == 0
    return digest_in(folder)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("leave", ["break", "return", "sys.exit()"])
def test_a_loop_left_on_purpose_is_saved_there_and_goes_on(
    leave: str, processes: int, digest: str, tmp_path: Path
) -> None:
    left = train(tmp_path, leave, processes)
    assert left.code == 0, left.err
    assert steps_saved(tmp_path) == [5, 7]
    newest = CheckpointStore(tmp_path / "runs/mine/checkpoints").manifest(7)
    assert not newest.facts["position"]["is_done"], "it is not finished"
    assert train(tmp_path, "pass", 3 - processes).code == 0
    assert digest_in(tmp_path) == digest


@pytest.mark.parametrize("processes", [1, 2])
def test_an_exception_keeps_the_saves_that_were_made(processes: int, digest: str, tmp_path: Path) -> None:
    assert train(tmp_path, "raise ValueError", processes).code not in (0, 75)
    assert steps_saved(tmp_path) == [5]
    assert train(tmp_path, "pass", 1).code == 0
    assert digest_in(tmp_path) == digest


def test_a_save_in_progress_is_completed_before_a_failing_rank_leaves(tmp_path: Path) -> None:
    large = SCRIPT.replace("nn.Linear(8, 3)", "nn.Sequential(nn.Linear(8, 500_000), nn.Linear(500_000, 3))")
    script = large.replace("step.accumulate", "if step.number == 6: raise ValueError\n        step.accumulate")
    (tmp_path / "train.py").write_text(script.replace("LEAVE", "pass"))
    run([*LOCKSTEP, "run", "-n", "2", "train.py", "runs/mine"], tmp_path)
    assert steps_saved(tmp_path) == [5]
