"""A recipe for commands that try one out (`lockstep verify`, `lockstep chaos`), and faults to plant in it."""

import tempfile
import zlib
from pathlib import Path

_ROOM = tempfile.TemporaryDirectory(prefix="lockstep-test-")

RECIPE = """
import random
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep
from lockstep.train.recipe import Splits


class Samples(Dataset):
    def __len__(self):
        return 88

    def __getitem__(self, index):
        return torch.full((4,), index / 88) + 0.1 * torch.randn(4), index % 3


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, inputs):
        return self.layers(inputs)


class Recipe:
    config_class = lockstep.Config
    pause_s = 0.0

    def model(self, config):
        return Classifier()

    def data(self, config):
        return Splits(Samples(), Samples())

    def loss(self, model, batch):
        time.sleep(self.pause_s)
        inputs, labels = batch
        return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)

    def metrics(self, model, batch):
        return {"loss": self.loss(model, batch)}


recipe = Recipe()
"""

FAILS = """
class Failing(Recipe):
    def loss(self, model, batch):
        raise ValueError("planted")


recipe = Failing()
"""
UNSEEDED_DATA = """
class Unseeded(Samples):
    def __getitem__(self, index):
        inputs, label = super().__getitem__(index)
        return inputs + random.SystemRandom().random(), label


class Planted(Recipe):
    def data(self, config):
        return Splits(Unseeded(), Samples())


recipe = Planted()
"""
# The model counts its steps outside of any state dict, so a resumed process computes another first step.
COUNTER = """
class Counts(Classifier):
    seen_version, num_steps = -1, 0

    def forward(self, inputs):
        version = self.layers[0].weight._version
        if self.training and version != self.seen_version:
            self.seen_version, self.num_steps = version, self.num_steps + 1
        return super().forward(inputs) * (1 + self.num_steps / 10)


class Planted(Recipe):
    def model(self, config):
        return Counts()


recipe = Planted()
"""


def plant(folder: Path, config: str, planted: str = "") -> dict[str, str]:
    """Write the recipe and planted.yaml to a folder; return the environment for commands that run there."""
    (folder / "planted.py").write_text(RECIPE + planted)
    (folder / "planted.yaml").write_text(config)
    temporary(folder).mkdir()
    return {"TMPDIR": str(temporary(folder))}


def temporary(folder: Path) -> Path:
    """Return where a command that runs in `folder` keeps its temporary files.

    It is a short path elsewhere: a data worker's socket is among them, and its path is limited to 107 bytes.
    """
    return Path(_ROOM.name) / f"{zlib.crc32(bytes(folder)):x}"
