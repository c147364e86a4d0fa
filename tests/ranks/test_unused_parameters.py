"""Parameters that a rank's loss does not use, in fast mode: named in an error, or not updated; never a hang."""

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import UserError
from lockstep.testing import RanksFailed, ranks
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.ranks.unused_workloads import Branches, loss, train


def refused(world: World, branches: Sequence[str]) -> str:
    with pytest.raises(UserError) as caught:
        train(world, branches, determinism="fast")
    return str(caught.value)


def test_parameters_that_no_rank_uses_are_named_in_the_first_step() -> None:
    for rank, message in enumerate(ranks(2).run(refused, ["left", "left"])):
        assert message.startswith(
            "no gradient for right.weight, right.bias, spare.0.weight, spare.0.bias, spare.1.weight and 3 more in the "
            f"backward pass of rank {rank}'s last lane: "
        )
        assert "find_unused_parameters=true" in message


def use_a_branch_later(world: World) -> None:
    """Use all branches in the first step; then one rank leaves a branch out."""
    model_of = Run(None, world, seed=2, determinism="fast")
    model = model_of.prepare(Branches())
    for parameter in model.spare.parameters():
        parameter.requires_grad_(False)
    optimizer = model_of.optimizer(model, lambda p: torch.optim.SGD(p, lr=0.1))

    def both(leaves_out: bool, model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        left, count = loss("left", model, batch)
        return left if leaves_out else left + loss("right", model, batch)[0], count

    data = TensorDataset(torch.ones(32, 4))
    for step in model_of.steps(model_of.loader(data, 8, lanes=4), steps=4, finish=False):
        step.accumulate(partial(both, world.rank == 1 and step.number == 2), model)
        step.update(optimizer)


def test_a_rank_with_an_unused_parameter_fails_at_once() -> None:
    message = r"no gradient for right\.weight, right\.bias in the backward pass of rank 1's last lane"
    with pytest.raises(RanksFailed, match=message):
        ranks(2, timeout_s=30).run(use_a_branch_later)


@pytest.mark.parametrize("compression", ["none", "bf16"])
@pytest.mark.parametrize("branches", [["left", "left"], ["left", "right"]])
def test_parameters_that_no_rank_uses_are_found_and_not_updated(branches: list[str], compression: str) -> None:
    options = {"determinism": "fast", "find_unused_parameters": True, "compression": compression}
    fast = ranks(2).run(train, branches, **options)
    exact = ranks(2).run(train, branches)[0]
    tolerance = 1e-5 if compression == "none" else 2e-2
    for own in fast:
        assert own.digests == fast[0].digests
        for ours, expected in zip(own.weights, exact.weights, strict=True):
            assert ours == pytest.approx(expected, rel=tolerance, abs=tolerance)
        assert own.weights[6:] == exact.weights[6:], "not even weight decay"
    unused = "right.weight, right.bias, spare.0.weight, spare.0.bias, spare.1.weight and 3 more"
    if branches == ["left", "right"]:
        unused = "spare.0.weight, spare.0.bias, spare.1.weight, spare.1.bias, spare.2.weight and 1 more"
    assert [own.said for own in fast][1] == []
    (line,) = fast[0].said
    assert line == f"no rank used {unused}: they are not updated"
