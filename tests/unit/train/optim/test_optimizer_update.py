"""Updates with several models: each update concerns only its own model."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.train.optim.lr_schedule import Schedule
from lockstep.train.run import Run
from lockstep.world.world import World


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[0])


def test_an_average_follows_the_updates_of_its_own_model_alone() -> None:
    run = Run(None, World())
    first, second = run.prepare(nn.Linear(2, 1)), run.prepare(nn.Linear(2, 1))
    first_steps = run.optimizer(first, lambda params: torch.optim.SGD(params, lr=0.1), Schedule.constant(warmup=4))
    second_steps = run.optimizer(second, lambda params: torch.optim.SGD(params, lr=0.1))
    average = run.ema(second)
    for step in run.steps(run.loader(TensorDataset(torch.ones(8, 2)), 2), steps=4, finish=False):
        step.accumulate(loss, first)
        step.update(first_steps)
        if step.every(2):
            step.accumulate(loss, second)
            step.update(second_steps)
        assert average.num_updates == step.number // 2
        assert first_steps.param_groups[0]["lr"] == 0.1 * step.number / 4
        assert second_steps.param_groups[0]["lr"] == 0.1
    assert average.num_updates == 2
    run.close()


def test_a_schedule_may_be_any_function_of_the_updates_made() -> None:
    run = Run(None, World())
    model = run.prepare(nn.Linear(2, 1))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=1.0), lambda completed: 0.5**completed)
    rates = []
    for step in run.steps(run.loader(TensorDataset(torch.ones(8, 2)), 2), steps=3, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 0.5, 0.25]
    run.close()


def test_evaluating_inside_a_lane_leaves_its_precision_alone() -> None:
    run = Run(None, World(), precision="bf16")
    model = run.prepare(nn.Linear(2, 1))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    data = TensorDataset(torch.ones(8, 2))
    step = next(iter(run.steps(run.loader(data, 2, lanes=1), steps=1, finish=False)))
    autocast = []
    for batch in step.lanes:
        run.evaluate(model, data, lambda model, batch: {"loss": loss(model, batch)})
        autocast.append(torch.is_autocast_enabled("cpu"))
        step.backward(*loss(model, batch))
    assert autocast == [True]
    assert not torch.is_autocast_enabled("cpu")
    step.update(optimizer)
    run.close()


def test_skips_that_do_not_come_in_a_row_may_be_many() -> None:
    run = Run(None, World(), on_nonfinite="skip")
    model = run.prepare(nn.Linear(1, 1))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=1e-3))
    data = torch.ones(240, 1)
    data[::2] = torch.nan
    for step in run.steps(run.loader(TensorDataset(data), 1, lanes=1, shuffle=False), epochs=1, finish=False):
        step.accumulate(loss, model)
        step.update(optimizer)
    assert (run.step, run.batches) == (120, 240)
    run.close()


def test_an_average_ignores_the_update_of_another_model_after_a_pass_over_both() -> None:
    run = Run(None, World())
    first, second = run.prepare(nn.Linear(2, 1)), run.prepare(nn.Linear(2, 1))
    optimizers = [run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1)) for model in (first, second)]
    average = run.ema(second)
    for step in run.steps(run.loader(TensorDataset(torch.ones(8, 2)), 2), steps=2, finish=False):
        for model, optimizer in zip((first, second), optimizers, strict=True):
            for batch in step.lanes:
                step.backward(*loss(model, batch))
            step.update(optimizer)
    assert average.num_updates == 2
    run.close()


def spoiled(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    return loss(model, batch)[0] * torch.nan, len(batch[0])


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("spoils", [(True, False), (False, True), (True, True)])
def test_skipped_updates_of_two_models_with_batch_norm(spoils: tuple[bool, bool], together: bool, lanes: int) -> None:
    """Both models have their passes before the first update. A skipped update leaves its model as before them."""
    run = Run(None, World(), on_nonfinite="skip", sinks=[])
    models = [run.prepare(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))) for _ in range(2)]
    optimizers = [run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1)) for model in models]
    step = next(iter(run.steps(run.loader(TensorDataset(torch.randn(32, 2)), 32, lanes=lanes), steps=1, finish=False)))
    before = {name: tensor.clone() for name, tensor in run.state().items()}
    for model, is_spoiled in zip(models, spoils, strict=True):
        step.accumulate(spoiled if is_spoiled else loss, model)
    for group in [optimizers] if together else [[optimizer] for optimizer in optimizers]:
        step.update(*group)
    changed = {name for name, tensor in run.state().items() if not torch.equal(tensor, before[name])}
    for prefix, is_spoiled in zip(("model/", "model1/"), spoils, strict=True):
        if is_spoiled or together:
            assert not any(name.startswith(prefix) for name in changed)
        else:
            assert f"{prefix}1.weight" in changed
    run.close(abandon=True)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_skipped_step_leaves_batch_norm_as_it_was(lanes: int) -> None:
    run = Run(None, World(), on_nonfinite="skip", sinks=[])
    model = run.prepare(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    data = TensorDataset(torch.full((32, 2), torch.nan))
    step = next(iter(run.steps(run.loader(data, 32, lanes=lanes), steps=1, finish=False)))
    before = {name: tensor.clone() for name, tensor in run.state().items()}
    step.accumulate(loss, model)
    step.update(optimizer)
    assert step.was_skipped
    assert [name for name, tensor in run.state().items() if not torch.equal(tensor, before[name])] == []
    run.close(abandon=True)


class Replaces(nn.Module):
    """Its buffer is another tensor after each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("center", torch.zeros(2))

    def forward(self, inputs: Tensor) -> Tensor:
        self.center = 0.9 * self.center + 0.1 * inputs.mean(0)
        value: Tensor = self.layer(inputs)
        return value


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_skipped_step_puts_back_a_buffer_that_was_replaced(lanes: int) -> None:
    run = Run(None, World(), on_nonfinite="skip", buffers={"center": "mean"}, sinks=[])
    model = run.prepare(Replaces())
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    step = next(iter(run.steps(run.loader(TensorDataset(torch.ones(8, 2)), 8, lanes=lanes), steps=1, finish=False)))
    step.accumulate(lambda model, batch: (loss(model, batch)[0] * torch.nan, 1), model)
    step.update(optimizer)
    assert step.was_skipped
    assert torch.equal(model.center, torch.zeros(2))
    run.close(abandon=True)


@pytest.mark.parametrize("lanes", [1, 4])
def test_clipping_where_no_parameter_was_used(lanes: int) -> None:
    run = Run(None, World(), clip_norm=1.0)
    model = run.prepare(nn.Linear(2, 1))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    outside = torch.ones((), requires_grad=True)
    step = next(iter(run.steps(run.loader(TensorDataset(torch.ones(8, 2)), 8, lanes=lanes), steps=1, finish=False)))
    step.accumulate(lambda _, batch: ((batch[0] * outside).sum(), 1), model)
    step.update(optimizer)
    assert step.grad_norm == 0.0
    run.close()


def test_a_backward_pass_after_its_lane_was_left_is_refused() -> None:
    run = Run(None, World())
    model = run.prepare(nn.Linear(2, 1))
    step = next(iter(run.steps(run.loader(TensorDataset(torch.ones(8, 2)), 8), steps=1, finish=False)))
    for batch in step.lanes:
        left = batch
        break
    with pytest.raises(UserError, match=r"inside `for batch in step\.lanes"):
        step.backward(*loss(model, left))
    run.close(abandon=True)


def test_rates_that_are_tensors_are_logged_as_numbers_and_read_once(tmp_path: Path) -> None:
    run = Run(tmp_path / "a", World(), sinks=[])
    model = run.prepare(nn.Linear(2, 1))
    rate = torch.tensor(0.5)
    optimizer = run.optimizer(model, lambda params: torch.optim.Adam(params, lr=rate), lambda _: 0.5)
    for step in run.steps(run.loader(TensorDataset(torch.ones(8, 2)), 8), steps=2):
        step.accumulate(loss, model)
        step.update(optimizer)
    assert rate == 0.25
    assert next(read_jsonl(tmp_path / "a" / "events.jsonl"))["learning_rates"] == [0.5]
