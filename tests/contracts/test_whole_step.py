"""Everything around the step, alone and together: the same bits on any number of processes, and the right ones."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.testing import ranks
from lockstep.train.optimizer import parameter_groups
from lockstep.train.run import Run
from lockstep.train.schedule import Schedule
from lockstep.train.trainer import Trainer
from lockstep.world.randomness import stream
from lockstep.world.world import World
from tests.sinks import Kept


class Outcome(NamedTuple):
    digest: str
    curve: list[str]  # each step's number, loss, rate and whether it was skipped
    metrics: str
    batches: int


class Normed(nn.Module):
    """Batch norm, dropout and a head whose bias has a rate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(40, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.body(inputs))
        return scores


def data(poison: float | None = None) -> TensorDataset:
    """With `poison`, one sample has it in place of a number."""
    inputs = torch.randn(101, 12, generator=stream(0, "inputs"))
    if poison is not None:
        inputs[40, 3] = poison
    return TensorDataset(inputs, torch.randint(0, 5, (101,), generator=stream(0, "labels")))


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


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
    averaged = run.average(model, 0.9) if average else None
    curve = []
    for step in run.open_steps(run.loader(data(poison), 24, lanes=8), steps=steps):
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


@pytest.mark.parametrize(("options", "around"), CASES.values(), ids=CASES.keys())
def test_any_number_of_processes_gives_the_same_bits(options: dict[str, Any], around: dict[str, Any]) -> None:
    (alone,) = ranks(1).run(train, options, **around)
    assert any(line.endswith("True") for line in alone.curve) == ("poison" in around), "a skip where there is a reason"
    for num_ranks in (2, 3, 4):
        for result in ranks(num_ranks).run(train, options, **around):
            assert result == alone


def test_each_of_them_matters() -> None:
    """Else the test above would compare the same run with itself."""
    plain: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    cases = [plain, *CASES.values()]
    outcomes = [ranks(1).run(train, options, **around)[0].digest for options, around in cases]
    assert len(set(outcomes)) == len(cases)


def by_hand(kind: str, global_batch: int, steps: int, clip_norm: float) -> list[float]:
    """One process, the whole batch at once, torch's own schedulers and clipping."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 5))
    optimizer = make_optimizer(kind, model)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=3)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - 4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[4])
    inputs, labels = data().tensors
    losses = []
    for number in range(steps):
        first = number * global_batch % (len(inputs) // global_batch * global_batch)
        batch = slice(first, first + global_batch)
        value = F.cross_entropy(model(inputs[batch]), labels[batch])
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
        losses.append(value.item())
    return losses


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_trainer_does_what_a_loop_written_by_hand_does(kind: str) -> None:
    """With accumulation over 4 lanes, warm-up and cosine, and clipping that clips."""
    steps, clip_norm = 24, 0.3
    told = Kept()
    run = Run(None, World(), clip_norm=clip_norm, sinks=[told], log_every=1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 5))
    trainer = Trainer(model, make_optimizer(kind, model), loss, schedule=Schedule.cosine(warmup=4), run=run)
    trainer.train(run.loader(data(), 24, lanes=4, shuffle=False), steps=steps)
    run.finish()
    losses = [event["loss"] for event in told.of("step")]
    assert losses == pytest.approx(by_hand(kind, 24, steps, clip_norm), rel=1e-4)
    assert losses[-1] < 0.95 * losses[0]
