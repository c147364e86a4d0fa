"""From plain `python` to one process per device, with a model, a sampler and loaders as other scripts have them:

    python examples/spawn.py                  # a process per GPU, or two where there is none
    python examples/spawn.py --nproc 4
    python examples/spawn.py --by torch       # torch.multiprocessing.spawn, as many scripts do it today
    lockstep run -n 2 examples/spawn.py       # under a launcher, the launcher counts
    torchrun --nproc-per-node 2 examples/spawn.py

The model may be wrapped in DistributedDataParallel or DataParallel already (`--wrap ddp`, `--wrap dp`), the batch split
by hand among the processes: the Trainer takes the wrapper off, reads the sampler's data set itself, and the digest in
the last line is the same in all these ways.

On several machines, give each the number of its first process, as in RANK=4 WORLD_SIZE=8: see `two_machines.sh`.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep

BATCH = 128  # over all processes


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


def load_images() -> tuple[TensorDataset, TensorDataset]:
    """1,797 images as rows of 64 pixels; every fifth is for the test."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(pixels[~is_test], labels[~is_test]), TensorDataset(pixels[is_test], labels[is_test])


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    """A sum and a count, so that parts of any size weigh right."""
    pixels, labels = batch
    return F.cross_entropy(model(pixels), labels, reduction="sum"), len(labels)


def accuracy(model: nn.Module, batch: list[Tensor]) -> dict[str, tuple[Tensor, int]]:
    pixels, labels = batch
    return {"accuracy": ((model(pixels).argmax(1) == labels).sum(), len(labels))}


def wrapped(model: nn.Module, wrap: str, world: lockstep.World) -> nn.Module:
    if wrap == "ddp" and world.size > 1:  # torch refuses it without a process group
        return DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)
    return nn.DataParallel(model) if wrap == "dp" else model


def train(world: lockstep.World, args: argparse.Namespace) -> None:
    run = lockstep.Run(args.run_dir, world, seed=0)  # first: weights are drawn from its seed
    model = wrapped(make_model().to(world.device), args.wrap, world)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_set, test_set = load_images()
    sampler = DistributedSampler(train_set, num_replicas=world.size, rank=world.rank, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=BATCH // world.size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=256)

    trainer = lockstep.Trainer(model, optimizer, loss, accuracy, run=run)
    trainer.train(train_loader, test_loader, epochs=args.epochs)
    run.finish()


def spawned_by_torch(rank: int, args: argparse.Namespace) -> None:
    """What `mp.spawn` calls in each process.

    Nobody looks after these. lockstep's launcher names one that dies, explains one that hangs, ends all with itself.
    """
    torch.set_num_threads(1)  # as lockstep.launch does; another number can change bits
    train(lockstep.setup_distributed(rank, args.nproc), args)
    lockstep.cleanup_distributed()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--by", choices=("lockstep", "torch"), default="lockstep", help="who starts the processes")
    parser.add_argument("--wrap", choices=("none", "ddp", "dp"), default="ddp")
    parser.add_argument("--run-dir", default="runs/spawn")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    if options.by == "torch":
        torch.multiprocessing.spawn(spawned_by_torch, args=(options,), nprocs=options.nproc)
    else:
        # One line, instead of rank, world_size and a port that is free: copies of this script, each with its world.
        lockstep.launch(lambda world: train(world, options), nproc=options.nproc)
