"""Does the number of processes change the result? lockstep beside plain DDP, Accelerate and Fabric, where installed.

    python bench/peer_bits.py [--steps 50] [--processes 1 2 3]

The same model (with dropout), data (shuffled), seed and global batch; each library as its manual has it, started by
torchrun over gloo, one thread a process. Printed: the sha256 of the weights for each number of processes, and how far
they are from those of one.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep

BATCH = 60  # over all processes: divisible by two and by three, which the peers need


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(3000, 20, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(20, 5, generator=generator)).argmax(1))


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 5))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain_ddp(steps: int) -> nn.Module:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(make_model())
    optimizer = make_optimizer(model)
    sampler = DistributedSampler(make_data())
    loader = DataLoader(make_data(), BATCH // dist.get_world_size(), sampler=sampler)
    for inputs, labels in _first(steps, loader, sampler.set_epoch):
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.module


def accelerate(steps: int) -> nn.Module:
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    accelerator = Accelerator(cpu=True)
    set_seed(0)
    model = make_model()
    loader = DataLoader(make_data(), BATCH // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, make_optimizer(model), loader)
    for inputs, labels in _first(steps, loader):
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
    unwrapped: nn.Module = accelerator.unwrap_model(model)
    return unwrapped


def lightning(steps: int) -> nn.Module:
    """Fabric, the part of Lightning that leaves the loop to its user."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
    fabric.launch()
    fabric.seed_everything(0, verbose=False)
    bare = make_model()
    model, optimizer = fabric.setup(bare, make_optimizer(bare))
    loader = fabric.setup_dataloaders(DataLoader(make_data(), BATCH // fabric.world_size, shuffle=True))
    for inputs, labels in _first(steps, loader):
        fabric.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
    return bare


def with_lockstep(steps: int) -> nn.Module:
    run = lockstep.Run(None, seed=0)
    model = run.prepare(make_model())
    optimizer = run.optimizer(model, make_optimizer(model))
    for step in run.steps(run.loader(make_data(), BATCH, lanes=4), steps=steps):
        step.accumulate(_loss, model)
        step.update(optimizer)
    return model


TRAININGS: dict[str, Callable[[int], nn.Module]] = {
    "plain DDP": plain_ddp,
    "Accelerate": accelerate,
    "Fabric": lightning,
    "lockstep": with_lockstep,
}


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def _first(steps: int, loader: Iterable[Any], start_epoch: Callable[[int], None] = lambda _: None) -> Iterator[Any]:
    """So many batches, over as many epochs as that takes."""
    made, epoch = 0, 0
    while True:
        start_epoch(epoch)
        for batch in loader:
            if made == steps:
                return
            yield batch
            made += 1
        epoch += 1


def be_a_worker(name: str, steps: int, file: str) -> None:
    torch.set_num_threads(1)
    model = TRAININGS[name](steps)
    if os.environ["RANK"] == "0":
        torch.save(model.state_dict(), file)
    lockstep.cleanup_distributed()


def weights_of(name: str, steps: int, processes: int, file: str) -> dict[str, Tensor] | str:
    """What rank 0 had at the end, or what went wrong."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    worker = [__file__, "--steps", str(steps), "--worker", name, "--file", file]
    finished = subprocess.run([*launcher, *worker], capture_output=True, text=True, timeout=300, check=False)
    if finished.returncode:
        errors = [line for line in finished.stderr.splitlines() if "Error" in line]
        return errors[0] if errors else f"exit code {finished.returncode}"
    weights: dict[str, Tensor] = torch.load(file, weights_only=True)
    return weights


def compare(steps: int, numbers: list[int]) -> None:
    print(f"| {steps} steps, batch {BATCH} | processes | sha256 of the weights | largest difference from one process |")
    print("|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, training in TRAININGS.items():
            if name in ("Accelerate", "Fabric") and importlib.util.find_spec(training.__name__) is None:
                print(f"| {name} | is not installed | | |", flush=True)
                continue
            reference: dict[str, Tensor] | None = None
            for processes in numbers:
                weights = weights_of(name, steps, processes, str(Path(folder) / "weights.pt"))
                if isinstance(weights, str):
                    print(f"| {name} | {processes} | failed: {weights} | |", flush=True)
                    continue
                reference = reference or weights
                apart = max((weights[key] - reference[key]).abs().max().item() for key in weights)
                print(f"| {name} | {processes} | `{lockstep.digest(weights)[:16]}` | {apart:.2g} |", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=50)
    arguments.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--worker", help="for the processes that it starts")
    arguments.add_argument("--file")
    options = arguments.parse_args()
    if options.worker:
        be_a_worker(options.worker, options.steps, options.file)
    else:
        compare(options.steps, options.processes)


if __name__ == "__main__":
    main()
