"""A training script to start from: the same result on one process or on many.

    python train.py
    lockstep run -n 2 train.py          # or: torchrun --nproc-per-node 2 train.py

Start it again after any interruption: it resumes from its newest checkpoint, on any number of processes.
"""

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep


# Your data: anything with __len__ and __getitem__. Draw from torch, numpy or random there: they are seeded per sample.
def make_data() -> tuple[Dataset[Any], Dataset[Any]]:
    inputs = torch.randn(1200, 8, generator=torch.Generator().manual_seed(0))
    labels = (inputs[:, :3].sum(1) > 0).long()
    return TensorDataset(inputs[:1000], labels[:1000]), TensorDataset(inputs[1000:], labels[1000:])


# Your model: an ordinary module.
def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))


# Your loss: a sum and a count, so that parts of unequal size are weighted correctly.
def loss(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


# Your metrics: sums and counts too, by name.
def metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    inputs, labels = batch
    return {"accuracy": ((model(inputs).argmax(1) == labels).sum(), len(labels))}


def main(world: lockstep.World) -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--epochs", type=int, default=10)
    options.add_argument("--global-batch", type=int, default=64, help="samples per step, over all processes")
    options.add_argument("--lr", type=float, default=3e-3)
    options.add_argument("--run", default="runs/train", help="the folder for checkpoints and events")
    given = options.parse_args()

    train_set, test_set = make_data()
    run = lockstep.Run(given.run, world, seed=0)  # also: precision="bf16", clip_norm=1.0, …
    model = run.prepare(make_model())
    schedule = lockstep.Schedule.cosine(warmup="20 steps")
    optimizer = run.optimizer(model, torch.optim.AdamW(model.parameters(), lr=given.lr), schedule)
    loader = run.loader(train_set, global_batch=given.global_batch, lanes=8)  # lanes: the maximum number of processes
    for step in run.steps(loader, epochs=given.epochs, save_every=100):
        step.accumulate(loss, model)
        step.update(optimizer)
        if step.every(50):
            run.log(loss=step.loss, **run.evaluate(model, test_set, metrics))


if __name__ == "__main__":
    lockstep.launch(main)
