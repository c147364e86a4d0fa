"""A NaN, an infinity or an overflow on one rank: all ranks make the same decision, and name the rank."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.events.jsonl import read_jsonl
from lockstep.testing import ranks
from lockstep.train.optim.lr_schedule import Schedule
from lockstep.train.optim.nonfinite import NonFiniteError
from lockstep.train.run import Run
from lockstep.train.step import Step
from lockstep.world.world import World

# With 4 lanes of 2 and no shuffling, sample 13 is in batch 2 (of 8 samples), lane 2: the second of rank 1's at W = 2.
CULPRIT, STEP, LANE = 13, 2, 2


class Model(nn.Module):
    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8) if batch_norm else nn.Tanh())
        self.gate = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor, marks: Tensor) -> Tensor:
        hidden = self.body(inputs)
        # This adds zero, but at a marked sample the gradient of the root of zero is infinite.
        hidden = hidden + (self.gate * 0 * marks.sum()).abs().sqrt() if (marks > 0).any() else hidden
        scores: Tensor = self.head(hidden)
        return scores


def data(kind: str) -> TensorDataset:
    inputs = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    marks = torch.zeros(48)
    if kind == "gradient":
        marks[CULPRIT] = 1.0
    elif kind == "constant":
        marks[CULPRIT] = -2.0
    elif kind == "overflow":
        marks[CULPRIT] = -1.0
    else:
        inputs[CULPRIT, 1] = float(kind)
    return TensorDataset(inputs, marks, torch.arange(48) % 3)


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    inputs, marks, labels = batch
    losses = F.cross_entropy(model(inputs, marks), labels, reduction="none")
    losses = losses + torch.where(marks == -2, torch.inf, 0.0)  # the gradients know nothing of it
    return (losses * torch.where(marks == -1, 1e4, 1.0)).sum(), len(labels)  # times the scale: more than fp16 can hold


def train(
    world: World, kind: str, folder: str | None = None, in_a_loop: bool = False, **options: Any
) -> tuple[list[tuple[Any, ...]], str]:
    torch.set_num_threads(1)
    run = Run(folder, world, sinks=[], **options)
    model = run.prepare(Model(batch_norm=kind != "overflow"))  # over two samples its gradients are large
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1), Schedule.linear(warmup=2))
    average = run.ema(model)
    seen = []

    def accumulate(step: Step) -> None:
        if in_a_loop:
            for batch in step.lanes:
                step.backward(*loss(model, batch))
        else:
            step.accumulate(loss, model)

    try:
        for step in run.steps(run.loader(data(kind), 8, lanes=4, shuffle=False), steps=4, finish=False):
            before = run.state()
            before = {name: tensor.clone() for name, tensor in before.items()}
            accumulate(step)
            step.update(optimizer)
            same = sorted(name for name, tensor in run.state().items() if torch.equal(tensor, before[name]))
            moved = len(before) - len(same)
            seen.append((step.number, step.was_skipped, moved, average.num_updates, optimizer.param_groups[0]["lr"]))
            seen[-1] += (run.batches, run.loss_scale)
    except NonFiniteError as error:
        return seen, str(error)
    finally:
        run.close(abandon=True)
    return seen, ""


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", ["nan", "inf"])
def test_a_loss_that_is_not_finite_is_named_by_step_lane_and_rank(num_ranks: int, kind: str, tmp_path: Path) -> None:
    results = ranks(num_ranks).run(train, kind, str(tmp_path / "run"))
    assert len({text for _, text in results}) == 1, "all ranks stop, and say the same"
    seen, text = results[0]
    assert [entry[0] for entry in seen] == [1]
    rank = LANE * num_ranks // 4
    assert text.startswith(f"step {STEP}: the loss is not finite in lane {LANE} (rank {rank})")
    assert "the gradient of body.0.weight, body.0.bias" in text
    incidents = [event for event in read_jsonl(tmp_path / "run" / "events.jsonl") if event["kind"] == "incident"]
    assert [event["step"] for event in incidents] == [STEP]
    assert "on_nonfinite=skip" in text


@pytest.mark.parametrize(("num_ranks", "parallel"), [(1, "auto"), (2, "ddp"), (4, "ddp"), (2, "zero"), (4, "zero")])
def test_a_nonfinite_gradient_is_named_even_if_every_loss_is_finite(num_ranks: int, parallel: str) -> None:
    for seen, text in ranks(num_ranks).run(train, "gradient", parallel=parallel):
        assert [entry[0] for entry in seen] == [1]
        rank = LANE * num_ranks // 4
        assert f"step {STEP}: the gradient is not finite in lane {LANE} (rank {rank}), for gate" in text
        assert text.count("gate") == 2
        assert "body" not in text


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_an_infinite_loss_is_named_even_if_every_gradient_is_finite(num_ranks: int, clip_norm: float | None) -> None:
    for seen, text in ranks(num_ranks).run(train, "constant", clip_norm=clip_norm):
        assert [entry[0] for entry in seen] == [1]
        assert f"step {STEP}: the loss is not finite in lane {LANE}" in text
        assert "over all lanes" not in text


def test_in_a_custom_loop_the_parameter_is_named() -> None:
    for _, text in ranks(2).run(train, "gradient", in_a_loop=True):
        assert re.match(rf"step {STEP}: the gradient is not finite .*the gradient of gate", text)


@pytest.mark.parametrize("kind", ["nan", "gradient"])
def test_a_skipped_step_changes_nothing_but_the_batch_number(kind: str) -> None:
    alone, *others = (ranks(number).run(train, kind, on_nonfinite="skip") for number in (1, 2, 4))
    others.append(ranks(4).run(train, kind, on_nonfinite="skip", parallel="zero"))
    seen, text = alone[0]
    assert text == ""
    assert all(result == alone[0] for results in others for result in results)
    numbers = [entry[0] for entry in seen]
    assert numbers == [1, 2, 2, 3, 4]
    skipped = seen[1]
    assert skipped[:3] == (2, True, 0), "weights, batch norm's statistics, average and optimizer stay as they were"
    assert [entry[3] for entry in seen] == [1, 1, 2, 3, 4]  # the average's updates
    assert seen[0][4] == skipped[4]  # the learning rate
    assert [entry[5] for entry in seen] == [0, 1, 2, 3, 4]  # batches before this one


def test_an_overflow_on_one_rank_is_skipped_by_all_and_halves_the_scale() -> None:
    alone, *others = (ranks(number).run(train, "overflow", precision="fp16") for number in (1, 2, 4))
    others.append(ranks(4).run(train, "overflow", precision="fp16", parallel="zero"))
    seen, text = alone[0]
    assert text == ""
    assert all(result == alone[0] for results in others for result in results)
    assert [entry[:2] for entry in seen] == [(1, False), (2, True), (2, False), (3, False), (4, False)]
    skipped = seen[1]
    assert skipped[2] == 2, "only the scale, and how long it has been good"
    assert skipped[3] == 1 and skipped[4] == seen[0][4], "neither average nor learning rate moved"
    assert skipped[6] == seen[0][6] / 2


def test_what_no_loss_scale_can_mend_is_not_taken_for_an_overflow() -> None:
    """The scale is halved down to one first; then the loss is reported."""
    for seen, text in ranks(2).run(train_on_the_culprit_alone):
        assert len(seen) == 16
        assert "the loss is not finite in lane 0 (rank 0) and in lane 1 (rank 1)" in text


def train_on_the_culprit_alone(world: World, **options: Any) -> tuple[list[float | None], str]:
    run = Run(None, world, sinks=[], precision="fp16", **options)
    model = run.prepare(nn.Linear(4, 1))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    scales = []
    try:
        loader = run.loader(TensorDataset(torch.full((4, 4), torch.nan)), 4, lanes=2)
        for step in run.steps(loader, steps=1, finish=False):
            step.accumulate(lambda model, batch: (model(*batch).sum(), 2), model)
            step.update(optimizer)
            scales.append(run.loss_scale)
    except NonFiniteError as error:
        return scales, str(error)
    finally:
        run.close(abandon=True)
    return scales, ""


def test_skipping_ends_after_100_updates_in_a_row() -> None:
    for scales, text in ranks(2).run(train_on_the_culprit_alone, on_nonfinite="skip"):
        assert len(scales) == 100
        assert "100 updates in a row were skipped" in text


def test_ignore_checks_nothing() -> None:
    for seen, text in ranks(2).run(train, "nan", on_nonfinite="ignore"):
        assert text == ""
        assert [entry[0] for entry in seen] == [1, 2, 3, 4]
        assert not any(entry[1] for entry in seen)


def calm_loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    inputs, marks, labels = batch
    return loss(model, [inputs, torch.zeros_like(marks), labels])


def train_two_models(world: World, first_overflows: bool) -> list[tuple[Any, ...]]:
    """Run both models' passes before the first update."""
    torch.set_num_threads(1)
    run = Run(None, world, sinks=[], precision="fp16")
    first, second = run.prepare(Model(batch_norm=False)), run.prepare(Model(batch_norm=False))
    first_steps = run.optimizer(first, lambda params: torch.optim.SGD(params, lr=0.0))
    second_steps = run.optimizer(second, lambda params: torch.optim.SGD(params, lr=0.0))
    seen = []
    for step in run.steps(run.loader(data("overflow"), 8, lanes=4, shuffle=False), steps=2, finish=False):
        step.accumulate(loss if first_overflows else calm_loss, first)
        step.accumulate(calm_loss, second)
        step.update(first_steps)
        was_skipped = step.was_skipped
        step.update(second_steps)
        gradients = [parameter.grad for parameter in second.parameters() if parameter.grad is not None]
        seen.append((was_skipped, step.was_skipped, step.loss, [gradient.tolist() for gradient in gradients]))
    run.close(abandon=True)
    return seen


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_overflow_in_one_update_does_not_change_the_scale_of_anothers_gradients(num_ranks: int) -> None:
    """The scale has changed before the second update, whose gradients were computed with the old one."""
    (calm,) = ranks(1).run(train_two_models, False)
    for seen in ranks(num_ranks).run(train_two_models, True):
        assert [entry[:2] for entry in seen] == [(False, False), (True, False)]
        assert seen[1][2:] == calm[1][2:], "a power of two, so not even the last bit is another"


class Spoils(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * torch.nan


def draw_after_a_skipped_step(world: World) -> float:
    run = Run(None, world, sinks=[], on_nonfinite="skip")
    model = run.prepare(nn.Linear(4, 3))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    steps = run.steps(run.loader(data("0"), 8, lanes=4), steps=1, finish=False)
    step = next(steps)
    step.accumulate(lambda model, batch: (Spoils.apply(model(batch[0]).sum()), 2), model)
    step.update(optimizer)
    assert step.was_skipped
    drawn = torch.rand(()).item()
    run.close(abandon=True)
    return drawn


def test_the_search_for_the_lane_leaves_random_streams_unchanged() -> None:
    """Each rank runs its own lanes again, and what is drawn after a step is the same on all."""
    assert len({drawn for number in (1, 2, 4) for drawn in ranks(number).run(draw_after_a_skipped_step)}) == 1
