"""Fast mode on one process: losses are divided by the previous count, and gradients end up over their own."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from lockstep.data.lanes import share_lanes
from lockstep.engine.ddp_reducer import DdpReducer
from lockstep.engine.fast_engine import FastEngine
from lockstep.world.world import World

LANES = 2


class Setting:
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.model = nn.Linear(3, 1, bias=False).to(dtype)
        self.engine = FastEngine(
            World(), share_lanes(LANES, 1), [self.model], make_reducer=partial(DdpReducer, world=World())
        )
        self.inputs = torch.ones(4, 3, dtype=dtype)

    def pass_over(self, count: int, *, divide_late: bool = False) -> list[float]:
        """Run a pass with this count in each lane; return the gradient of each lane's loss."""
        arrived: list[Tensor] = []
        lane_pass = self.engine.start_pass(list(self.model.parameters()), divide_late=divide_late)
        for lane in range(LANES):
            lane_pass.open_lane(lane, len(self.inputs))
            loss_sum = self.model(self.inputs).sum()
            loss_sum.register_hook(arrived.append)
            lane_pass.backward({"loss": (loss_sum, count)}, more=False)
            lane_pass.close_lane()
        lane_pass.end()
        lane_pass.finish()
        return [gradient.item() for gradient in arrived]

    @property
    def gradient(self) -> Tensor:
        assert self.model.weight.grad is not None
        return self.model.weight.grad

    def expected(self, count: int) -> Tensor:
        return torch.full_like(self.model.weight, LANES * len(self.inputs) / max(LANES * count, 1))


@pytest.mark.parametrize("counts", [[4, 4, 4], [4, 3, 3, 5]])
def test_gradients_are_divided_by_their_own_count_whatever_the_previous_count(counts: Sequence[int]) -> None:
    setting = Setting()
    for count in counts:
        setting.pass_over(count)
        torch.testing.assert_close(setting.gradient, setting.expected(count))


def test_an_unchanged_count_needs_no_pass_over_the_gradients() -> None:
    setting = Setting()
    setting.pass_over(3)
    assert setting.pass_over(3) == pytest.approx([1 / 6] * LANES)
    changes = setting.gradient._version
    setting.pass_over(5)
    assert setting.gradient._version == changes + 1


def test_divide_late_leaves_the_losses_unscaled() -> None:
    setting = Setting()
    for _ in range(2):
        assert setting.pass_over(3, divide_late=True) == [1.0] * LANES
        torch.testing.assert_close(setting.gradient, setting.expected(3))


def test_losses_in_half_precision_are_not_divided_in_advance() -> None:
    setting = Setting(torch.bfloat16)
    for _ in range(2):
        assert setting.pass_over(3) == [1.0] * LANES
        torch.testing.assert_close(setting.gradient, setting.expected(3))
