"""The first step's checks: what a forward pass may keep in attributes, and that looking leaves no trace."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import UserError
from lockstep.train.run import Run
from lockstep.world.world import World

LANES = 4


class Recording(nn.Linear):
    """Keeps in its attributes what a forward pass has seen, and what it computes with itself."""

    def __init__(self, use: Callable[["Recording"], Any] = lambda _: 1.0) -> None:
        super().__init__(3, 1)
        self.calls, self.seen, self.by_size = 0, [], {}  # type: ignore[var-annotated]
        self.last, self.total = None, torch.zeros(1)
        self.generator = torch.Generator().manual_seed(0)
        self.use = use

    def forward(self, inputs: Tensor) -> Tensor:
        factor = self.use(self)
        self.calls += 1
        self.seen.append(len(inputs))
        self.by_size[len(inputs)] = self.calls
        self.last = inputs.sum()
        self.total += 1
        return super().forward(inputs) * factor


def train(model: Recording, **options: Any) -> Recording:
    run = Run(None, World(), **options)
    run.prepare(model)
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=0.1))
    data = TensorDataset(torch.randn(16, 3, generator=torch.Generator().manual_seed(1)))
    for step in run.steps(run.loader(data, 16, lanes=LANES), steps=1):
        step.accumulate(lambda model, batch: (model(batch[0]).square().sum(), len(batch[0])), model)
        step.update(optimizer)
    return model


def test_what_is_only_recorded_is_left_as_the_lanes_have_made_it() -> None:
    model = train(Recording())
    assert (model.calls, model.total.item()) == (LANES, LANES)
    assert (model.seen, model.by_size) == ([4] * LANES, {4: LANES})


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("calls", lambda model: 1.0 + model.calls),
        ("last", lambda model: 1.0 if model.last is None else model.last.item()),
        ("total", lambda model: 1.0 + model.total.item()),
        ("generator", lambda model: torch.rand(1, generator=model.generator).item()),
    ],
)
def test_what_a_forward_pass_depends_on_is_named(name: str, use: Callable[[Recording], Any]) -> None:
    with pytest.raises(UserError, match=f"depends on the model's attribute.*{name}"):
        train(Recording(use))


def test_fast_mode_does_not_promise_to_be_independent_of_it() -> None:
    assert train(Recording(lambda model: 1.0 + model.calls), determinism="fast").calls == LANES
