"""Partial sums of gradients inside a rank: every missing gradient counts as zeros, down to the sign of a zero."""

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.gradients import OneRankGradients
from lockstep.engine.scaling import scale_gradients

NEGATIVE_ZERO = torch.tensor([-0.0])


def summed(lanes: list[Tensor | None], *, one_pass: bool) -> Tensor | None:
    """The sum of one parameter's gradients; None: the lane does not use it."""
    parameter = Parameter(torch.ones(1))
    tree = OneRankGradients([parameter], range(len(lanes)))
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
    """As between ranks, where zeros travel: -0.0 + 0.0 is 0.0."""
    gradient = summed(lanes, one_pass=one_pass)
    assert gradient is not None
    assert not is_negative_zero(gradient)


@pytest.mark.parametrize("one_pass", [True, False])
def test_where_all_use_it_nothing_else_is_added(one_pass: bool) -> None:
    assert is_negative_zero(summed([NEGATIVE_ZERO] * 4, one_pass=one_pass))


def test_where_none_uses_it_there_is_no_gradient() -> None:
    assert summed([None] * 4, one_pass=True) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_scaling_has_the_same_bits_in_pieces_and_in_one(dtype: torch.dtype) -> None:
    values = torch.randn(200, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole, scale = values.clone(), torch.tensor(1 / 37, dtype=torch.float64)
    scale_gradients([whole], scale)
    pieces = [values[:3].clone(), values[3].clone(), *(value.clone() for value in values[4:])]  # many of no dimension
    scale_gradients(pieces, scale)
    assert torch.equal(torch.cat([piece.reshape(-1) for piece in pieces]), whole)


def test_the_callers_gradients_are_left_to_nobody() -> None:
    parameter = Parameter(torch.ones(1))
    tree = OneRankGradients([parameter], range(2))
    tree.begin()
    tree.open_lane(0, one_pass=True)
    parameter.sum().backward()
    tree.close_lane()
    assert parameter.grad is None
