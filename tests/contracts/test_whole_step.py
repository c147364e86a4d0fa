"""Every option of a step, alone and together: the same bits on any number of processes, and the right ones."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.testing import ranks
from lockstep.train.optim.lr_schedule import Schedule
from lockstep.train.run import Run
from lockstep.train.trainer import Trainer
from lockstep.world.world import World
from tests.classification import loss
from tests.contracts.whole_step_cases import CASES, data, train
from tests.sinks import RecordingSink


@pytest.mark.parametrize(("options", "around"), CASES.values(), ids=CASES.keys())
def test_any_number_of_processes_gives_the_same_bits(options: dict[str, Any], around: dict[str, Any]) -> None:
    (alone,) = ranks(1).run(train, options, **around)
    assert any(line.endswith("True") for line in alone.curve) == ("poison" in around), "a skip where there is a reason"
    for num_ranks in (2, 3, 4):
        for result in ranks(num_ranks).run(train, options, **around):
            assert result == alone


def test_every_option_changes_the_result() -> None:
    """Otherwise the test above would compare equal runs."""
    plain: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    cases = [plain, *CASES.values()]
    outcomes = [ranks(1).run(train, options, **around)[0].digest for options, around in cases]
    assert len(set(outcomes)) == len(cases)


def by_hand(kind: str, global_batch: int, steps: int, clip_norm: float) -> list[float]:
    """Train on one process, with the whole batch at once and torch's own schedulers and clipping."""
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
    """With accumulation over 4 lanes, warm-up and cosine decay, and gradients above the clipping norm."""
    steps, clip_norm = 24, 0.3
    sink = RecordingSink()
    run = Run(None, World(), clip_norm=clip_norm, sinks=[sink], log_every=1)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(12, 40), nn.GELU(), nn.Linear(40, 5))
    trainer = Trainer(model, make_optimizer(kind, model), loss, schedule=Schedule.cosine(warmup=4), run=run)
    trainer.train(run.loader(data(), 24, lanes=4, shuffle=False), steps=steps)
    run.finish()
    losses = [event["loss"] for event in sink.of("step")]
    assert losses == pytest.approx(by_hand(kind, 24, steps, clip_norm), rel=1e-4)
    assert losses[-1] < 0.95 * losses[0]
