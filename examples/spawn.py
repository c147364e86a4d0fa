"""Start one process per device from plain `python`, with an ordinary model, sampler and loaders:

    python examples/spawn.py                  # one process per GPU, or two without a GPU
    python examples/spawn.py --nproc 4
    python examples/spawn.py --by torch       # with torch.multiprocessing.spawn, as many scripts do
    lockstep run -n 2 examples/spawn.py       # a launcher decides the number of processes
    torchrun --nproc-per-node 2 examples/spawn.py

The model may already be wrapped in DistributedDataParallel or DataParallel (`--wrap ddp`, `--wrap dp`), and the batch
divided among the processes by hand: the Trainer removes the wrapper and reads the sampler's data set itself. The digest
in the last line is the same in all these cases.

On several machines, set RANK to the first rank of each machine, as in RANK=4 WORLD_SIZE=8: see `two_machines.sh`.
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
    """Return 1,797 images as rows of 64 pixels; every fifth is held out for the test."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(pixels[~is_test], labels[~is_test]), TensorDataset(pixels[is_test], labels[is_test])


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    """Return a sum and a count, so that parts of different sizes are weighted correctly."""
    pixels, labels = batch
    return F.cross_entropy(model(pixels), labels, reduction="sum"), len(labels)


def accuracy(model: nn.Module, batch: list[Tensor]) -> dict[str, tuple[Tensor, int]]:
    pixels, labels = batch
    return {"accuracy": ((model(pixels).argmax(1) == labels).sum(), len(labels))}


def wrapped(model: nn.Module, wrap: str, world: lockstep.World) -> nn.Module:
    if wrap == "ddp" and world.size > 1:  # DDP needs a process group
        return DistributedDataParallel(model, device_ids=[world.device] if world.device.type == "cuda" else None)
    return nn.DataParallel(model) if wrap == "dp" else model


def train(world: lockstep.World, args: argparse.Namespace) -> None:
    run = lockstep.Run(args.run_dir, world, seed=0)  # first: it seeds the weights
    model = wrapped(make_model().to(world.device), args.wrap, world)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train_set, test_set = load_images()
    sampler = DistributedSampler(train_set, num_replicas=world.size, rank=world.rank, shuffle=True)
    train_loader = DataLoader(train_set, batch_size=BATCH // world.size, sampler=sampler, drop_last=True)
    test_loader = DataLoader(test_set, batch_size=256)

    trainer = lockstep.Trainer(model, optimizer, loss, accuracy, run=run)
    trainer.train(train_loader, test_loader, epochs=args.epochs)


def spawned_by_torch(rank: int, args: argparse.Namespace) -> None:
    """Called by `mp.spawn` in each process.

    These processes are not supervised. lockstep's launcher reports a process that dies, explains one that hangs, and
    ends them all when it ends.
    """
    torch.set_num_threads(1)  # as lockstep.launch does; the number of threads can change the bits
    train(lockstep.setup_distributed(rank, args.nproc), args)
    lockstep.cleanup_distributed()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--nproc", type=int, default=torch.cuda.device_count() or 2)
    parser.add_argument("--by", choices=("lockstep", "torch"), default="lockstep", help="what starts the processes")
    parser.add_argument("--wrap", choices=("none", "ddp", "dp"), default="ddp")
    parser.add_argument("--run-dir", default="runs/spawn")
    return parser.parse_args()


if __name__ == "__main__":
    options = parse()
    if options.by == "torch":
        torch.multiprocessing.spawn(spawned_by_torch, args=(options,), nprocs=options.nproc)
    else:
        # Starts copies of this script and passes each its World: no rank, world size or port to manage.
        lockstep.launch(lambda world: train(world, options), nproc=options.nproc)
