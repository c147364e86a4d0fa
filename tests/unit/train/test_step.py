"""One step on one process: what it computes, and its errors on misuse."""

import gc
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import UserError
from lockstep.train.run import Run
from lockstep.train.step import Step
from lockstep.world.world import World

INPUTS = torch.randn(24, 5, generator=torch.Generator().manual_seed(0))
TARGETS = torch.randn(24, 1, generator=torch.Generator().manual_seed(1))


def squared(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    inputs, targets = batch
    return F.mse_loss(model(inputs), targets, reduction="sum"), len(inputs)


class Setting:
    """A linear model whose single step sees all the data."""

    def __init__(self, lanes: int = 4, **options: Any) -> None:
        self.run = Run(None, World(), **options)
        self.model = self.run.prepare(nn.Linear(5, 1))
        self.optimizer = self.run.optimizer(self.model, lambda params: torch.optim.SGD(params, lr=0.0))
        self.loader = self.run.loader(TensorDataset(INPUTS, TARGETS), 24, lanes=lanes)

    def first_step(self) -> Step:
        return next(iter(self.run.steps(self.loader, steps=1, finish=False)))

    @property
    def gradient(self) -> Tensor:
        assert self.model.weight.grad is not None
        return self.model.weight.grad

    def mean_gradient(self) -> Tensor:
        mean = F.mse_loss(self.model(INPUTS), TARGETS)
        return torch.autograd.grad(mean, self.model.weight)[0]


@pytest.mark.parametrize("lanes", [1, 2, 8])
@pytest.mark.parametrize("determinism", ["lockstep", "fast"])
def test_gradient_and_loss_are_those_of_the_mean_over_all_lanes(lanes: int, determinism: str) -> None:
    setting = Setting(lanes, determinism=determinism)
    step = setting.first_step()
    step.accumulate(squared, setting.model)
    step.update(setting.optimizer)
    torch.testing.assert_close(setting.gradient, setting.mean_gradient())
    assert step.loss == pytest.approx(F.mse_loss(setting.model(INPUTS), TARGETS).item())


@pytest.mark.parametrize(("determinism", "lanes"), [("lockstep", 1), ("lockstep", 4), ("fast", 4)])
def test_a_step_is_freed_at_once_with_its_batch(determinism: str, lanes: int) -> None:
    """A reference cycle would keep the memory in use until the garbage collector runs."""
    setting = Setting(lanes, determinism=determinism)
    steps = iter(setting.run.steps(setting.loader, steps=4, finish=False))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            step = next(steps)
            step.accumulate(squared, setting.model)
            step.update(setting.optimizer)
        del step
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_fast_mode_leaves_losses_the_size_that_the_fp16_scale_gives_them() -> None:
    setting = Setting(2, determinism="fast", precision="fp16")
    arrived: list[float] = []

    def watched(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        loss_sum, count = squared(model, batch)
        loss_sum.register_hook(lambda gradient: arrived.append(gradient.item()))
        return loss_sum, count

    for step in setting.run.steps(setting.loader, steps=2, finish=False):
        step.accumulate(watched, setting.model)
        step.update(setting.optimizer)
    assert len(arrived) == 4 and len(set(arrived)) == 1


def test_a_loop_over_the_lanes_equals_accumulate() -> None:
    one, other = Setting(), Setting()
    step = one.first_step()
    step.accumulate(squared, one.model)
    step.update(one.optimizer)
    step = other.first_step()
    for batch in step.lanes:
        step.backward(*squared(other.model, batch))
    step.update(other.optimizer)
    assert torch.equal(one.gradient, other.gradient)


@pytest.mark.parametrize("lanes", [1, 4])
def test_losses_of_a_lane_may_have_one_element_or_no_dimension(lanes: int) -> None:
    setting = Setting(lanes)
    step = setting.first_step()
    for batch in step.lanes:
        loss_sum, count = squared(setting.model, batch)
        step.backward(loss_sum, count, more=True)
        step.backward(squared(setting.model, batch)[0].reshape(1), 0)
    step.update(setting.optimizer)
    torch.testing.assert_close(setting.gradient, 2 * setting.mean_gradient())


@pytest.mark.parametrize("lanes", [1, 4])
def test_several_backward_passes_in_a_lane_add_up(lanes: int) -> None:
    setting = Setting(lanes)
    step = setting.first_step()
    for batch in step.lanes:
        loss_sum, count = squared(setting.model, batch)
        step.backward(loss_sum, count, more=True)
        step.backward(2 * squared(setting.model, batch)[0], 0)
    step.update(setting.optimizer)
    torch.testing.assert_close(setting.gradient, 3 * setting.mean_gradient())
    assert step.loss == pytest.approx(3 * F.mse_loss(setting.model(INPUTS), TARGETS).item())


@pytest.mark.parametrize("lanes", [1, 4])
def test_the_counts_of_several_passes_add_up_too(lanes: int) -> None:
    setting = Setting(lanes)
    step = setting.first_step()
    for batch in step.lanes:
        step.backward(*squared(setting.model, batch), more=True)
        step.backward(*squared(setting.model, batch))
    step.update(setting.optimizer)
    torch.testing.assert_close(setting.gradient, setting.mean_gradient())


@pytest.mark.parametrize("lanes", [1, 4])
def test_every_term_has_its_own_count(lanes: int) -> None:
    setting = Setting(lanes)

    def two_terms(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, tuple[Tensor, float]]:
        loss_sum, count = squared(model, batch)
        return {"all": (loss_sum, count), "half": (loss_sum.clone(), torch.tensor(count / 2))}  # type: ignore[dict-item]

    step = setting.first_step()
    step.accumulate(two_terms, setting.model)
    step.update(setting.optimizer)
    torch.testing.assert_close(setting.gradient, 3 * setting.mean_gradient())


def test_lanes_without_any_count_leave_zeros() -> None:
    setting = Setting()
    step = setting.first_step()
    step.accumulate(lambda model, batch: (0 * squared(model, batch)[0], 0), setting.model)
    step.update(setting.optimizer)
    assert torch.equal(setting.gradient, torch.zeros_like(setting.gradient))
    assert step.loss == 0


def test_a_lane_without_a_backward_pass_adds_nothing() -> None:
    setting = Setting(lanes=8)
    step = setting.first_step()
    kept = []
    for number, batch in enumerate(step.lanes):
        if number in (0, 5, 7):
            continue
        kept.append(batch)
        step.backward(*squared(setting.model, batch))
    step.update(setting.optimizer)
    inputs, targets = (torch.cat(parts) for parts in zip(*kept, strict=True))
    mean = F.mse_loss(setting.model(inputs), targets)
    torch.testing.assert_close(setting.gradient, torch.autograd.grad(mean, setting.model.weight)[0])


def test_padding_weighs_nothing() -> None:
    run = Run(None, World())
    model = run.prepare(nn.Linear(5, 1))
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.0))
    loader = run.loader(TensorDataset(INPUTS, TARGETS), 32, lanes=8, tail="pad")

    def weighted(model: nn.Module, batch: Sequence[Tensor], *, weight: Tensor) -> tuple[Tensor, Tensor]:
        inputs, targets = batch
        assert len(inputs) == 4, "static shapes"
        return (weight * (model(inputs) - targets).square().squeeze(1)).sum(), weight.sum()

    step = next(iter(run.steps(loader, steps=1, finish=False)))
    with pytest.raises(UserError, match=r"loss\(model, batch, weight\)"):
        step.accumulate(squared, model)
    step.accumulate(weighted, model)
    step.update(optimizer)
    mean = F.mse_loss(model(INPUTS), TARGETS)
    torch.testing.assert_close(model.weight.grad, torch.autograd.grad(mean, model.weight)[0])


def test_clipping() -> None:
    setting = Setting(clip_norm=0.01)
    step = setting.first_step()
    step.accumulate(squared, setting.model)
    step.update(setting.optimizer)
    assert step.grad_norm > 0.01
    bias = setting.model.bias.grad
    assert bias is not None
    assert torch.cat([setting.gradient.flatten(), bias]).norm() == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize(("determinism", "lanes"), [("lockstep", 1), ("lockstep", 4), ("fast", 4)])
def test_gradients_of_other_models_are_left_alone(determinism: Any, lanes: int) -> None:
    run = Run(None, World(), determinism=determinism)
    first, second = run.prepare(nn.Linear(5, 5)), run.prepare(nn.Linear(5, 1))
    optimizer = run.optimizer(second, lambda params: torch.optim.SGD(params, lr=0.1))
    step = next(iter(run.steps(run.loader(TensorDataset(INPUTS, TARGETS), 24, lanes=lanes), steps=1, finish=False)))
    step.accumulate(lambda model, batch: squared(nn.Sequential(first, model), batch), second)
    step.update(optimizer)
    assert first.weight.grad is None
    assert second.weight.grad is not None


def test_misuse_is_an_error() -> None:
    setting = Setting()
    step = setting.first_step()
    with pytest.raises(UserError, match="belongs inside"):
        step.backward(torch.zeros(()), 1)
    with pytest.raises(UserError, match="without gradients"):
        step.update(setting.optimizer)
    with pytest.raises(UserError, match="known after"):
        _ = step.loss
    with pytest.raises(UserError, match="a loss is a sum and a count"):
        step.accumulate(lambda model, batch: squared(model, batch)[0], setting.model)  # type: ignore[arg-type, return-value]


def test_a_second_backward_pass_must_be_announced() -> None:
    setting = Setting()
    step = setting.first_step()
    with pytest.raises(UserError, match="pass more=True"):
        for batch in step.lanes:
            step.backward(*squared(setting.model, batch))
            step.backward(*squared(setting.model, batch))
    step = setting.first_step()
    with pytest.raises(UserError, match="but none followed"):
        for batch in step.lanes:
            step.backward(*squared(setting.model, batch), more=True)


def test_gradients_are_not_lost_by_a_second_pass() -> None:
    setting = Setting()
    step = setting.first_step()
    step.accumulate(squared, setting.model)
    with pytest.raises(UserError, match="would lose the first gradients: call"):
        step.accumulate(squared, setting.model)


def test_skipping_lanes_is_an_error() -> None:
    setting = Setting()
    step = setting.first_step()
    for batch in step.lanes:
        step.backward(*squared(setting.model, batch))
        break
    with pytest.raises(UserError, match="or all of step"):
        step.update(setting.optimizer)


def test_terms_keep_their_names() -> None:
    setting = Setting()
    step = setting.first_step()
    names = iter("abcd")
    with pytest.raises(UserError, match="the same names"):
        step.accumulate(lambda model, batch: {next(names): squared(model, batch)}, setting.model)


def test_a_step_without_any_loss_is_an_error() -> None:
    setting = Setting()
    step = setting.first_step()
    with pytest.raises(UserError, match="no lane had a loss"):
        for _ in step.lanes:
            pass


def test_after_a_pass_that_failed_the_next_starts_afresh() -> None:
    setting = Setting()
    step = setting.first_step()
    with pytest.raises(ZeroDivisionError):
        for number, batch in enumerate(step.lanes):
            step.backward(*squared(setting.model, batch))
            _ = 1 / (2 - number)
    step.accumulate(squared, setting.model)
    step.update(setting.optimizer)
    torch.testing.assert_close(setting.gradient, setting.mean_gradient())


def test_sparse_gradients_are_refused() -> None:
    run = Run(None, World())
    model = run.prepare(nn.EmbeddingBag(5, 2, sparse=True, mode="sum"))
    step = next(
        iter(run.steps(run.loader(TensorDataset(torch.zeros(8, 2, dtype=torch.int64)), 8), steps=1, finish=False))
    )
    with pytest.raises(UserError, match="sparse"):
        step.accumulate(lambda model, batch: (model(batch[0]).sum(), 1), model)


@pytest.mark.parametrize("count", [np.int64(1), np.float32(1), torch.tensor(1), torch.tensor([1.0])], ids=repr)
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_count_may_be_any_number(count: Any, lanes: int) -> None:
    setting = Setting(lanes)
    step = setting.first_step()
    step.accumulate(lambda model, batch: (squared(model, batch)[0], count * len(batch[0])), setting.model)
    step.update(setting.optimizer)
    torch.testing.assert_close(setting.gradient, setting.mean_gradient())
    assert step.loss == pytest.approx(F.mse_loss(setting.model(INPUTS), TARGETS).item())


def test_a_wrong_count_is_an_error() -> None:
    setting = Setting()
    with pytest.raises(UserError, match="a number or a tensor of one element, not 'many'"):
        setting.first_step().accumulate(lambda model, batch: (squared(model, batch)[0], "many"), setting.model)  # type: ignore[arg-type, return-value]


def test_a_plain_backward_in_a_lane_is_an_error() -> None:
    setting = Setting()
    step = setting.first_step()
    with pytest.raises(UserError, match="a lane called"):
        for batch in step.lanes:
            squared(setting.model, batch)[0].backward()  # type: ignore[no-untyped-call]
    step = setting.first_step()
    with pytest.raises(UserError, match=r"call step\.backward\(…\) in place of loss\.backward"):
        for batch in step.lanes:
            step.backward(*squared(setting.model, batch))
            squared(setting.model, batch)[0].backward()  # type: ignore[no-untyped-call]


def test_a_parameter_that_changes_in_a_lane_is_named() -> None:
    run = Run(None, World())
    model = run.prepare(nn.Sequential(nn.Embedding(5, 2, max_norm=0.1)))
    step = next(iter(run.steps(run.loader(TensorDataset(torch.zeros(8, dtype=torch.int64)), 8), steps=1, finish=False)))
    with pytest.raises(UserError, match=r"changes the parameter 0\.weight"):
        step.accumulate(lambda model, batch: (model(batch[0]).sum(), 1), model)


def test_between_lanes_and_update_gradients_can_be_read_and_changed() -> None:
    setting = Setting()
    step = setting.first_step()
    step.accumulate(squared, setting.model)
    torch.testing.assert_close(setting.gradient, setting.mean_gradient())
    norm = nn.utils.clip_grad_norm_(setting.model.parameters(), 0.01)
    assert norm > 0.01
    assert step.grad_norm == pytest.approx(0.01, rel=1e-4)
    assert list(step.gradients()) == ["weight", "bias"]
    setting.optimizer.param_groups[0]["lr"] = 0.1
    step.gradients()["weight"].zero_()
    before = setting.model.weight.detach().clone()
    step.update(setting.optimizer)
    assert torch.equal(setting.model.weight, before)


def test_a_graph_can_be_kept_for_a_second_backward_pass() -> None:
    setting = Setting()
    step = setting.first_step()
    for batch in step.lanes:
        loss_sum, count = squared(setting.model, batch)
        step.backward(loss_sum, count, more=True, retain_graph=True)
        step.backward(loss_sum, 0)
    step.update(setting.optimizer)
    torch.testing.assert_close(setting.gradient, 2 * setting.mean_gradient())


def test_two_passes_may_wait_for_two_updates() -> None:
    run = Run(None, World(), clip_norm=0.01)
    models = [run.prepare(nn.Linear(5, 1)) for _ in range(2)]
    optimizers = [run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.0)) for model in models]
    step = next(iter(run.steps(run.loader(TensorDataset(INPUTS, TARGETS), 24), steps=1, finish=False)))
    for model in models:
        step.accumulate(squared, model)
    for model, optimizer in zip(models, optimizers, strict=True):
        step.update(optimizer)
        assert torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm() == pytest.approx(
            0.01, rel=1e-4
        )


def test_a_parameter_of_two_optimizers_is_clipped_once() -> None:
    setting = Setting(clip_norm=0.01)
    other = setting.run.optimizer(setting.model, torch.optim.SGD(setting.model.parameters(), lr=0.0))
    step = setting.first_step()
    step.accumulate(squared, setting.model)
    step.update(setting.optimizer, other)
    gradients = [p.grad.flatten() for p in setting.model.parameters() if p.grad is not None]
    assert torch.cat(gradients).norm() == pytest.approx(0.01, rel=1e-4)


def test_passes_of_one_step_draw_different_numbers() -> None:
    setting = Setting()
    step = setting.first_step()
    drawn = []
    for _ in range(2):
        for batch in step.lanes:
            drawn.append((torch.rand(1).item(), np.random.rand(), random.random()))
            step.backward(*squared(setting.model, batch))
        step.update(setting.optimizer)
    assert len(set(drawn)) == 8
