"""Cuts the power of a whole run after each call that changes a file, and resumes the run from what is left.

    python -m tests.faults.cut_runs FOLDER

It runs in its own process, for the reason given in ended_saves.py.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint.checkpoint_store import CheckpointStore
from lockstep.checkpoint.ledger import read_ledger
from lockstep.events.run_folder import RunFolder
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.faults.disk_model import Disk, LosesAll
from tests.faults.system_calls import trace

_STEPS = 3
_RESUME_EVERY = 16  # training takes time


def train(folder: Path) -> str:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(64, 4, generator=generator), torch.arange(64) % 3)
    run = Run(folder, World(), seed=3, sinks=[])
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    for step in run.steps(run.loader(data, 16), steps=_STEPS, finish=False):
        step.accumulate(lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), 16), model)
        step.update(optimizer)
        run.save()
    return run.finish()


def main(folder: Path) -> None:
    here = folder / "here"
    here.mkdir()
    disk = Disk(here)
    calls = trace(lambda: train(here / "runs" / "a") and None, here).calls
    digest = train(folder / "uncut")
    commits = [str(CheckpointStore(here / "runs/a/checkpoints").manifest(step).commit) for step in range(1, _STEPS + 1)]
    num_resumed = 0
    for index, call in enumerate(calls):
        disk.apply(call)
        left = folder / "left"
        disk.write_survivors(left, LosesAll())
        run = left / "runs" / "a"
        store = CheckpointStore(run / "checkpoints")
        if steps := store.steps():
            assert RunFolder(run).read_run_json()["run_id"] == store.load(steps[0]).manifest.run_id
            lines = {line["commit"] for line in read_ledger(run / "ledger.jsonl")}
            assert lines >= set(commits[: steps[0] - 1]), "a line is missing from the ledger, and no manifest has it"
        if index % _RESUME_EVERY == 0 or index == len(calls) - 1:
            assert train(run) == digest, f"after a power cut at call {index} the result is another one"
            num_resumed += 1
        shutil.rmtree(left)
    assert steps[0] == _STEPS, "the run had finished, and its last checkpoint is lost"
    print(json.dumps({"calls": len(calls), "resumed": num_resumed}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
