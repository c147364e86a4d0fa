"""An ordinary training script: a small conv net on handwritten digits, evaluated after every epoch. Run it with any of:

    python examples/train.py --epochs 10 --batch-size 32
    lockstep run -n 2 examples/train.py --epochs 10 --batch-size 32
    torchrun --nproc-per-node 2 examples/train.py --epochs 10 --batch-size 32
    python -m torch.distributed.launch --nproc-per-node 2 examples/train.py --epochs 10 --batch-size 32

or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT by hand for each `python`. For several machines see
`two_machines.sh`.

`--batch-size` is the batch of each process: with two processes an update uses twice as many images, which changes the
result. `--global-batch 64` is the batch over all processes: with it, all of these commands give the same result, bit
for bit. The last line prints the digest of weights, buffers and optimizer state.

Stop it with Ctrl-C, or kill it: when you start it again, it resumes, on any number of processes.
`train_plain_ddp.py` is the same training without lockstep, for comparison.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep

LANES = 8  # parts of a batch, computed one after another or on up to eight processes
BASE_BATCH, BASE_RATE = 32, 2e-3  # the learning rate was tuned at this batch


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10),
    )  # fmt: skip


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """Return 1,797 images of 8 × 8 pixels; every fifth is held out for the test."""
    digits = load_digits()
    pixels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(pixels[~is_test], labels[~is_test]), TensorDataset(pixels[is_test], labels[is_test])


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    """Return a sum and a count, so that parts of different sizes are weighted correctly."""
    pixels, labels = batch
    return F.cross_entropy(model(pixels), labels, reduction="sum"), len(labels)


def accuracy(model: nn.Module, batch: list[Tensor]) -> dict[str, tuple[Tensor, int]]:
    pixels, labels = batch
    return {"accuracy": ((model(pixels).argmax(1) == labels).sum(), len(labels))}


def train(world: lockstep.World, epochs: int, global_batch: int, folder: str) -> str:
    """Train to the end, resuming from the folder if it holds a checkpoint; return the digest."""
    run = lockstep.Run(folder, world, seed=0, clip_norm=1.0)
    train_set, test_set = load_images()
    loader = run.loader(train_set, global_batch=global_batch, lanes=LANES)  # every image once per epoch, in a new order

    model = run.prepare(make_model())  # the same module: no wrapper, and no prefix in checkpoints
    rate = lockstep.scaled_lr(BASE_RATE, global_batch, BASE_BATCH, "sqrt")  # a larger batch allows a higher rate
    warmup = lockstep.Schedule.constant(warmup="1 epoch")
    optimizer = run.optimizer(model, torch.optim.AdamW(model.parameters(), lr=rate), warmup)

    for step in run.steps(loader, epochs=epochs, save_every="1 epoch"):
        step.accumulate(loss, model)  # forward and backward over this process's lanes
        step.update(optimizer)  # reduce over all processes, clip, step
        if step.is_epoch_end:
            # All processes evaluate together, each image once; rank 0 prints and logs.
            run.log(epoch=step.epoch + 1, loss=step.loss, **run.evaluate(model, test_set, accuracy))
    return run.digest()


def main(world: lockstep.World) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="images per update, on each process")
    parser.add_argument("--global-batch", type=int, help="images per update, over all processes; replaces --batch-size")
    parser.add_argument("--run-dir", help="the run folder; default: runs/train-BATCH")
    args = parser.parse_args()

    global_batch = args.global_batch or args.batch_size * world.size
    if world.is_main:
        print(f"effective batch {global_batch}, processes {world.size}")
    train(world, args.epochs, global_batch, args.run_dir or f"runs/train-{global_batch}")


if __name__ == "__main__":
    lockstep.launch(main)
