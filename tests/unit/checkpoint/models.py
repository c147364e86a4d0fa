"""Small models to load weights into, and how to compare them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import LockstepError
from lockstep.train.optim.ema import ExponentialMovingAverage

Save = Callable[..., Path]


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].running_mean.normal_()  # type: ignore[union-attr,operator]
    return model


class Tied(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def averaged(model: nn.Module) -> ExponentialMovingAverage:
    average = ExponentialMovingAverage(model, 0.5)
    with torch.no_grad():
        for _ in range(3):
            for number, parameter in enumerate(model.parameters(), start=1):
                parameter += number
            average.update()
    return average


def values(state: Mapping[str, Tensor]) -> list[list[float]]:
    return [tensor.flatten().tolist() for tensor in state.values()]


def same(one: nn.Module, other: nn.Module) -> bool:
    return values(one.state_dict()) == values(other.state_dict())


def message_of(attempt: Callable[[], object]) -> str:
    with pytest.raises(LockstepError) as caught:
        attempt()
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return str(caught.value)


def line_of(attempt: Callable[[], object]) -> str:
    line = message_of(attempt)
    assert "\n" not in line and len(line) < 600
    return line
