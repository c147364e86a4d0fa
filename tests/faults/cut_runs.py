"""A whole run whose power is cut, after every call that changes a file; it must be able to go on from what is left.

    python -m tests.faults.cut_runs FOLDER

In a process of its own, for the reason that ended_saves.py gives.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.checkpoint.ledger import read_ledger
from lockstep.checkpoint.store import Store
from lockstep.events.run_folder import RunFolder
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.faults.disk_model import Disk, LosesAll
from tests.faults.system_calls import follow

_STEPS = 3
_RESUME_EVERY = 16  # training takes its time


def train(folder: Path) -> str:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(64, 4, generator=generator), torch.arange(64) % 3)
    run = Run(folder, World(), seed=3, sinks=[])
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    for step in run.open_steps(run.loader(data, 16), steps=_STEPS):
        step.accumulate(lambda model, batch: (F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), 16), model)
        step.update(optimizer)
        run.save()
    return run.finish()


def main(folder: Path) -> None:
    here = folder / "here"
    here.mkdir()
    disk = Disk(here)
    calls = follow(lambda: train(here / "runs" / "a") and None, here).calls
    digest = train(folder / "uncut")
    commits = [str(Store(here / "runs/a/checkpoints").manifest(step).commit) for step in range(1, _STEPS + 1)]
    num_resumed = 0
    for index, call in enumerate(calls):
        disk.take_in(call)
        left = folder / "left"
        disk.write_survivors(left, LosesAll())
        run = left / "runs" / "a"
        store = Store(run / "checkpoints")
        if steps := store.steps():
            assert RunFolder(run).read_facts()["run_id"] == store.load(steps[0]).manifest.run_id
            lines = {line["commit"] for line in read_ledger(run / "ledger.jsonl")}
            assert lines >= set(commits[: steps[0] - 1]), "the ledger lacks a line that no checkpoint's manifest has"
        if index % _RESUME_EVERY == 0 or index == len(calls) - 1:
            assert train(run) == digest, f"after a cut at call {index} it comes to another result"
            num_resumed += 1
        shutil.rmtree(left)
    assert steps[0] == _STEPS, "the run was over, and its end is lost"
    print(json.dumps({"calls": len(calls), "resumed": num_resumed}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
