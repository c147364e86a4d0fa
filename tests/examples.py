"""Run the scripts of examples/ in this process: the result of one process, without the cost of starting one."""

import json
import runpy
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

from lockstep.world.world import World

EXAMPLES = Path(__file__).parents[1] / "examples"


def train_alone(folder: Path, *, epochs: int) -> str:
    """Return the digest of `train.py --global-batch 64`."""
    return _digest("train", folder, World(), epochs, 64, str(folder))


def spawn_alone(folder: Path, *, epochs: int, wrap: str) -> str:
    """Return the digest of `spawn.py`."""
    return _digest("spawn", folder, World(), Namespace(epochs=epochs, wrap=wrap, run_dir=str(folder)))


def _digest(name: str, folder: Path, *arguments: Any) -> str:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as every process of a launcher has
    try:
        runpy.run_path(str(EXAMPLES / f"{name}.py"))["train"](*arguments)
    finally:
        torch.set_num_threads(threads)
    last = (folder / "events.jsonl").read_text().splitlines()[-1]
    return str(json.loads(last)["digest"])
