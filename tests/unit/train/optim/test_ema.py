"""The EMA of a model's weights."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from lockstep.errors import UserError
from lockstep.train.optim.ema import ExponentialMovingAverage


def walk(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_it_is_what_torch_averages() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    ours, theirs = (
        ExponentialMovingAverage(model, 0.9, warmup=False),
        AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
    )
    theirs.update_parameters(model)  # torch's first call takes the weights over, as ours does when it is made
    for _ in range(5):
        walk(model)
        ours.update()
        theirs.update_parameters(model)
    for name, parameter in theirs.module.named_parameters():
        torch.testing.assert_close(ours.state()[name], parameter.detach())


def test_the_warm_up_forgets_the_first_weights_quickly() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    slow, quick = ExponentialMovingAverage(model, 0.999, warmup=False), ExponentialMovingAverage(model, 0.999)
    nn.init.ones_(model.weight)
    for _ in range(10):
        slow.update()
        quick.update()
    assert slow.state()["weight"].item() < 0.011
    assert quick.state()["weight"].item() > 0.98


def test_the_model_has_the_averages_inside_and_its_own_weights_again_afterwards() -> None:
    model = nn.Linear(2, 2)
    average = ExponentialMovingAverage(model, 0.5, warmup=False)
    walk(model)
    own = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="inside"), average.applied():
        assert torch.equal(model.weight, average.state()["weight"])
        assert not torch.equal(model.weight, own["weight"])
        raise RuntimeError("inside")
    assert torch.equal(model.weight, own["weight"])


def test_half_precision_is_averaged_in_fp32() -> None:
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    average = ExponentialMovingAverage(model, 0.9999, warmup=False)
    with torch.no_grad():
        model.weight.mul_(2)
    for _ in range(100):
        average.update()
    assert average.state()["weight"].item() == pytest.approx(1.01, abs=1e-3)
    with average.applied():
        assert model.weight.dtype == torch.bfloat16


def test_its_state_is_restored() -> None:
    model = nn.Linear(2, 2)
    average = ExponentialMovingAverage(model)
    walk(model)
    average.update()
    other = ExponentialMovingAverage(nn.Linear(2, 2))
    other.load_state(average.state())
    assert torch.equal(other.state()["weight"], average.state()["weight"])
    assert other.num_updates == 1


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_an_impossible_decay_is_refused(decay: float) -> None:
    with pytest.raises(UserError, match="decay="):
        ExponentialMovingAverage(nn.Linear(1, 1), decay)


def test_whole_numbers_are_not_averaged() -> None:
    model = nn.Linear(1, 1)
    model.register_parameter("index", nn.Parameter(torch.arange(3), requires_grad=False))
    average = ExponentialMovingAverage(model)
    average.update()
    assert sorted(average.state()) == ["bias", "num_updates", "weight"]
