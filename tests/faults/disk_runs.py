"""A small run that saves every step, and disks for it that can be filled up or made read-only."""

import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.train.run import Run
from lockstep.world.world import World

WIDTH = 4000  # two files of 32 pages in a checkpoint
STEPS = 6
PAGE = 4096

Actions = Mapping[int, Callable[[], object]]  # what happens to the disk before which step


def train(folder: Path | None, actions: Actions | None = None, steps: int = STEPS) -> str:
    """Train and return the digest. Each step is saved before the next one begins."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.rand(96, 4, generator=generator), torch.arange(96) % 3)
    run = Run(folder, World(), seed=3, sinks=[])
    model = run.prepare(nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3)))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    try:
        for step in run.steps(run.loader(data, 16), steps=steps, finish=False):
            for thread in threading.enumerate():
                if thread.name == "lockstep-save":
                    thread.join()
            (actions or {}).get(step.number, lambda: None)()
            step.accumulate(lambda m, batch: (F.cross_entropy(m(batch[0]), batch[1], reduction="sum"), 16), model)
            step.update(optimizer)
            run.save()
        return run.finish()
    finally:
        run.close()


class mounted:
    """Mounts a file system for a `with` block; skips the test where that is not allowed."""

    def __init__(self, place: Path, *arguments: str) -> None:
        self._place, self._arguments = place, arguments

    def __enter__(self) -> Path:
        self._place.mkdir(exist_ok=True)
        made = subprocess.run(["mount", *self._arguments, str(self._place)], capture_output=True, check=False)
        if made.returncode != 0:
            pytest.skip("only root can mount a disk")
        return self._place

    def __exit__(self, *_: object) -> None:
        subprocess.run(["umount", "-l", str(self._place)], check=True)


def fill(place: Path, left_bytes: int = 0) -> None:
    """Fill a disk with a file, up to the last `left_bytes`."""
    try:
        with (place / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(PAGE)):
                pass
    except OSError:
        pass
    size = (place / "ballast").stat().st_size
    with (place / "ballast").open("ab") as file:
        file.truncate(size - left_bytes)


def make_room(place: Path) -> None:
    """Remove what `fill` wrote."""
    (place / "ballast").unlink()
