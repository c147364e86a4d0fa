"""One row of the tables of mistakes, and the script that most rows change in one place."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

import pytest


@dataclass(frozen=True)
class Mistake:
    """What somebody does, and the one line with which lockstep answers.

    `says` is a regular expression that exactly one line of the output matches (that a rank in a job of several says it
    is not counted again). A mistake that ends the script by an error must not show a traceback.
    """

    name: str  # of the test
    says: str
    script: str = ""  # becomes train.py
    command: str = "python train.py"  # or "lockstep …"
    code: int = 2
    files: Mapping[str, str] = field(default_factory=dict)  # besides train.py
    env: Mapping[str, str] = field(default_factory=dict)
    shows_traceback: bool = False  # where the user's own line matters
    timeout_s: float = 60.0
    is_slow: bool = False  # in the slow tier: it takes several runs, and others like it are in the fast one


# What scripts begin with; like the rest, for `str.format`.
TASK = """
import sys
import lockstep
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


def loss(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def accuracy(model, batch):
    inputs, labels = batch
    return {{"accuracy": ((model(inputs).argmax(1) == labels).sum(), len(labels))}}

"""
SCRIPT = (
    TASK
    + """
{before}


def main(world):
    run = lockstep.Run({run})
    model = run.prepare({model})
    optimizer = {optimizer}
    data = TensorDataset(torch.randn(64, 8), torch.randint(0, 3, (64,)))
    loader = {loader}
{setup}
    for step in run.steps(loader, {steps}):
{body}
{after}


if __name__ == "__main__":
    lockstep.launch(main)
"""
)

_PARTS = {
    "before": "",
    "run": "'runs/mine', world, seed=7",
    "model": "nn.Linear(8, 3)",
    "optimizer": "run.optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))",
    "loader": "run.loader(data, global_batch=16, lanes=4)",
    "setup": "pass",
    "steps": "steps=4",
    "body": "step.accumulate(loss, model)\nstep.update(optimizer)",
    "after": "pass",
}
_DEPTHS = {"setup": 1, "body": 2, "after": 1}


def training_script(**parts: str) -> str:
    """Return a script whose training is right, but for these parts of it."""
    assert parts.keys() <= _PARTS.keys(), parts.keys() - _PARTS.keys()
    given = {name: parts.get(name, default).strip("\n") for name, default in _PARTS.items()}
    return SCRIPT.format(**{name: indent(text, "    " * _DEPTHS.get(name, 0)) for name, text in given.items()})


def as_parameters(mistakes: list[Mistake]) -> list[Any]:
    """Return the rows as parameters of a test, each with its name."""
    return [pytest.param(each, id=each.name, marks=[pytest.mark.slow] * each.is_slow) for each in mistakes]
