"""Sums of gradients on one rank: the worked example of four lanes, and missing gradients, which count as zeros."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.gradient_tree import LocalGradientTree
from lockstep.engine.lane_tree import TreeNode, leaf

NEGATIVE_ZERO = torch.tensor([-0.0])


def summed(lanes: list[Tensor | None], *, one_pass: bool) -> Tensor | None:
    """Return the sum of one parameter's gradients. None: the lane does not use the parameter."""
    parameter = Parameter(torch.ones(1))
    tree = LocalGradientTree([parameter], range(len(lanes)))
    tree.begin()
    for lane, gradient in enumerate(lanes):
        tree.open_lane(lane, one_pass=one_pass)
        if gradient is not None:
            (parameter * gradient).sum().backward()
        tree.close_lane()
    tree.finish(lambda: torch.tensor(1.0, dtype=torch.float64))
    return parameter.grad


def is_negative_zero(gradient: Tensor | None) -> bool:
    return gradient is not None and gradient.item() == 0 and bool(torch.signbit(gradient))


@pytest.mark.parametrize("one_pass", [True, False])
@pytest.mark.parametrize(
    "lanes",
    [
        [NEGATIVE_ZERO, None],
        [None, NEGATIVE_ZERO],
        [NEGATIVE_ZERO, NEGATIVE_ZERO, None, None],
        [None, None, NEGATIVE_ZERO, NEGATIVE_ZERO],
    ],
    ids=["left lane", "right lane", "left pair", "right pair"],
)
def test_a_lane_that_does_not_use_a_parameter_adds_a_zero(lanes: list[Tensor | None], one_pass: bool) -> None:
    """As between ranks, where zeros are sent: -0.0 + 0.0 is 0.0."""
    gradient = summed(lanes, one_pass=one_pass)
    assert gradient is not None
    assert not is_negative_zero(gradient)


@pytest.mark.parametrize("one_pass", [True, False])
def test_no_zero_is_added_if_all_lanes_use_the_parameter(one_pass: bool) -> None:
    assert is_negative_zero(summed([NEGATIVE_ZERO] * 4, one_pass=one_pass))


def test_a_parameter_that_no_lane_uses_has_no_gradient() -> None:
    assert summed([None] * 4, one_pass=True) is None


def test_four_lanes_on_one_rank_are_added_as_the_worked_example_says() -> None:
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(2))
    parameter = Parameter(torch.ones(3))
    tree = LocalGradientTree([parameter], range(4))
    tree.begin()
    partial_sums = []
    for lane, value in enumerate(values):
        tree.open_lane(lane, one_pass=True)
        assert (parameter.grad is None) == (lane % 2 == 0), "an odd lane adds to its sibling's gradient"
        (parameter * value).sum().backward()
        tree.close_lane()
        partial_sums.append([node for node, _ in tree._sums])
    pair, pairs = TreeNode(1, 0), TreeNode(2, 0)
    assert partial_sums == [[leaf(0)], [pair], [pair, leaf(2)], [pairs]]
    tree.finish(lambda: torch.tensor(0.25, dtype=torch.float64))
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, ((values[0] + values[1]) + (values[2] + values[3])) * 0.25)


def test_closing_a_lane_empties_grad() -> None:
    parameter = Parameter(torch.ones(1))
    tree = LocalGradientTree([parameter], range(2))
    tree.begin()
    tree.open_lane(0, one_pass=True)
    parameter.sum().backward()
    tree.close_lane()
    assert parameter.grad is None
