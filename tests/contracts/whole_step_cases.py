"""Runs that use what a step offers: precision, clipping, schedules, averages."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.train.optim.lr_schedule import Schedule
from lockstep.train.optim.optimizer_factory import parameter_groups
from lockstep.train.run import Run
from lockstep.world.keyed_random import keyed_generator
from lockstep.world.world import World
from tests.classification import loss


class Outcome(NamedTuple):
    digest: str
    curve: list[str]  # each step's number, loss, rate and whether it was skipped
    metrics: str
    batches: int


class Normed(nn.Module):
    """Batch norm, dropout, and a head whose bias has its own learning rate."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(40, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(inputs))
        return scores


def data(poison: float | None = None) -> TensorDataset:
    """Return the data; `poison` replaces a number of one sample."""
    inputs = torch.randn(101, 12, generator=keyed_generator(0, "inputs"))
    if poison is not None:
        inputs[40, 3] = poison
    return TensorDataset(inputs, torch.randint(0, 5, (101,), generator=keyed_generator(0, "labels")))


def metrics(model: nn.Module, batch: list[Tensor]) -> dict[str, tuple[Tensor, int]]:
    inputs, labels = batch
    scores = model(inputs)
    return {
        "accuracy": ((scores.argmax(1) == labels).sum(), len(labels)),
        "loss": (F.cross_entropy(scores, labels, reduction="sum"), len(labels)),
    }


def train(
    world: World,
    options: dict[str, Any],
    *,
    schedule: bool = False,
    groups: bool = False,
    average: bool = False,
    poison: float | None = None,
    steps: int = 7,
) -> Outcome:
    torch.set_num_threads(1)
    run = Run(None, world, seed=5, **options)
    model = run.prepare(Normed())
    rules = [{"match": "*.bias", "lr_factor": 0.5, "weight_decay": 0.0}] if groups else []
    optimizer = run.optimizer(
        model,
        torch.optim.AdamW(parameter_groups(model, rules, lr=0.02)),  # type: ignore[arg-type]
        Schedule.cosine(warmup="3 steps", final=0.1) if schedule else None,
    )
    averaged = run.ema(model, 0.9) if average else None
    curve = []
    for step in run.steps(run.loader(data(poison), 24, lanes=8), steps=steps, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
        curve.append(f"{step.number} {step.loss!r} {optimizer.param_groups[0]['lr']!r} {step.was_skipped}")
    if averaged is not None:
        with averaged.applied():
            shown = run.evaluate(model, data(), metrics, batch=8)
    else:
        shown = run.evaluate(model, data(), metrics, batch=8)
    return Outcome(run.finish(), curve, repr(shown), run.batches)


EVERYTHING = {"schedule": True, "groups": True, "average": True}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "bf16": ({"precision": "bf16"}, {}),
    "fp16": ({"precision": "fp16"}, {}),
    "a schedule": ({}, {"schedule": True}),
    "parameter groups": ({}, {"groups": True}),
    "an average": ({}, {"average": True}),
    "a step skipped": ({"on_nonfinite": "skip"}, {"poison": torch.nan}),
    "everything": ({"precision": "bf16", "clip_norm": 0.5, "on_nonfinite": "skip"}, EVERYTHING | {"poison": torch.inf}),
    "everything in fp16": ({"precision": "fp16", "clip_norm": 0.5}, EVERYTHING | {"poison": 1e5}),
}
