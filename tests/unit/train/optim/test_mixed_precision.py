"""Autocast and the loss scale."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.train.optim import mixed_precision
from lockstep.train.optim.mixed_precision import LossScaler, MixedPrecision
from lockstep.train.run import Run
from lockstep.train.step import Step
from lockstep.world.world import World

CPU = torch.device("cpu")


def test_the_scale_starts_at_a_power_of_two_over_the_batch() -> None:
    scaler = LossScaler(48, CPU)
    assert scaler.scale == 2.0**16
    assert scaler.factor.item() == scaler.factor_value == 2.0**10  # 48 is rounded up to 64


def test_it_halves_on_overflow_and_doubles_after_many_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_precision, "_STEPS_TO_GROW", 3)
    scaler = LossScaler(1, CPU)
    scaler.grow()
    scaler.grow()
    scaler.shrink()
    assert scaler.scale == 2.0**15
    scaler.grow()
    scaler.grow()
    assert scaler.scale == 2.0**15, "an overflow begins the count again"
    scaler.grow()
    assert scaler.scale == 2.0**16
    for _ in range(100):
        scaler.grow()
    assert scaler.scale == 2.0**24


def test_it_can_shrink_down_to_one() -> None:
    scaler = LossScaler(1, CPU)
    for _ in range(16):
        assert scaler.can_shrink
        scaler.shrink()
    assert scaler.scale == 1.0
    assert not scaler.can_shrink


def test_its_state_is_restored() -> None:
    scaler, other = LossScaler(4, CPU), LossScaler(4, CPU)
    scaler.shrink()
    scaler.grow()
    other.load_state(scaler.state())
    assert (other.scale, other.state()["good_steps"].item(), other.factor_value) == (
        2.0**15,
        1,
        scaler.factor_value,
    )


def test_the_contexts_can_be_entered_repeatedly() -> None:
    half = MixedPrecision("bf16", CPU)
    layer, inputs = nn.Linear(2, 2), torch.ones(1, 2)
    for _ in range(2):
        with half.autocast:
            assert layer(inputs).dtype == torch.bfloat16
            with half.no_autocast:
                assert layer(inputs).dtype == torch.float32
            assert layer(inputs).dtype == torch.bfloat16
        assert layer(inputs).dtype == torch.float32


class Telling(nn.Module):
    """Records the dtypes it computed in; its backward pass is written in Python, so autocast could affect it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.types: list[tuple[str, torch.dtype]] = []

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        self.types.append(("forward", outputs.dtype))
        wide = outputs.float()
        if wide.requires_grad:
            wide.register_hook(lambda gradient: self.types.append(("backward", (gradient @ gradient.T).dtype)))
        return wide.sum()


@pytest.mark.parametrize("form", ["function", "loop"])
def test_lanes_run_under_autocast_and_their_backward_passes_do_not(form: str) -> None:
    run = Run(None, World(), precision="bf16")
    model = run.prepare(Telling())
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))

    def accumulate(step: Step) -> None:
        if form == "function":
            step.accumulate(lambda model, batch: (model(*batch), 2), model)
        else:
            for batch in step.lanes:
                step.backward(model(*batch), 2)

    for step in run.steps(run.loader(TensorDataset(torch.ones(8, 4)), 4, lanes=2), steps=2, finish=False):
        accumulate(step)
        step.update(optimizer)
    assert model.types == [("forward", torch.bfloat16), ("backward", torch.float32)] * 4
    assert not torch.is_autocast_enabled("cpu")
    run.evaluate(model, TensorDataset(torch.ones(8, 4)), lambda model, batch: {"sum": (model(*batch), 8)})
    assert model.types[-1] == ("forward", torch.bfloat16), "evaluation sees what training sees"
    run.close()


def test_fp16_trains_as_fp32_does() -> None:
    """Small gradients, which vanish in fp16 without a scale."""
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(inputs, 1e-3 * inputs.sum(1, keepdim=True))

    def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, int]:
        return 1e-3 * (model(batch[0]).float() - batch[1]).square().sum(), len(batch[0])

    def train(name: str) -> tuple[Tensor, float]:
        run = Run(None, World(), precision=name, seed=1)
        model = run.prepare(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
        optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=10.0))
        for step in run.steps(run.loader(data, 16, lanes=4), steps=30, finish=False):
            step.accumulate(loss, model)
            step.update(optimizer)
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        run.close()
        return weights, step.loss

    (half, half_loss), (full, full_loss) = train("fp16"), train("fp32")
    torch.testing.assert_close(half, full, rtol=2e-2, atol=2e-3)
    assert half_loss == pytest.approx(full_loss, rel=0.1), "the loss is shown without its scale"
