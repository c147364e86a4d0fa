"""After the gradient, with several models: each update concerns its own."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.train.run import Run
from lockstep.train.schedule import Schedule
from lockstep.world.world import World


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
    return model(batch[0]).square().sum(), len(batch[0])


def test_an_average_follows_the_updates_of_its_own_model_alone() -> None:
    run = Run(None, World())
    first, second = run.prepare(nn.Linear(2, 1)), run.prepare(nn.Linear(2, 1))
    first_steps = run.optimizer(first, lambda params: torch.optim.SGD(params, lr=0.1), Schedule.constant(warmup=4))
    second_steps = run.optimizer(second, lambda params: torch.optim.SGD(params, lr=0.1))
    average = run.average(second)
    for step in run.open_steps(run.loader(TensorDataset(torch.ones(8, 2)), 2), steps=4):
        step.accumulate(loss, first)
        step.update(first_steps)
        if step.every(2):
            step.accumulate(loss, second)
            step.update(second_steps)
        assert average.num_updates == step.number // 2
        assert first_steps.param_groups[0]["lr"] == 0.1 * step.number / 4
        assert second_steps.param_groups[0]["lr"] == 0.1
    run.close()


def test_a_schedule_may_be_any_function_of_the_updates_made() -> None:
    run = Run(None, World())
    model = run.prepare(nn.Linear(2, 1))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=1.0), lambda completed: 0.5**completed)
    rates = []
    for step in run.open_steps(run.loader(TensorDataset(torch.ones(8, 2)), 2), steps=3):
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
    for step in run.open_steps(run.loader(data, 2, lanes=1), steps=1):
        for batch in step.lanes:
            run.evaluate(model, data, lambda model, batch: {"loss": loss(model, batch)})
            assert torch.is_autocast_enabled("cpu")
            step.backward(*loss(model, batch))
        assert not torch.is_autocast_enabled("cpu")
        step.update(optimizer)
    run.close()


def test_skips_that_do_not_come_in_a_row_may_be_many() -> None:
    run = Run(None, World(), on_nonfinite="skip")
    model = run.prepare(nn.Linear(1, 1))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=1e-3))
    data = torch.ones(240, 1)
    data[::2] = torch.nan
    for step in run.open_steps(run.loader(TensorDataset(data), 1, lanes=1, shuffle=False), epochs=1):
        step.accumulate(loss, model)
        step.update(optimizer)
    assert (run.step, run.batches) == (120, 240)
    run.close()
