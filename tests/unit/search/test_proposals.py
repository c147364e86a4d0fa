"""Designs that the policy thinks up."""

import torch

from lockstep.search.frame import Frame
from lockstep.search.network import GuidanceNetwork
from lockstep.search.proposals import propose
from lockstep.world.randomness import stream
from tests.unit.search.guided import GENOME

PARENTS = GENOME.sample(40, stream(3, "parents"))
FRAME = Frame.around(GENOME, PARENTS)


def network(**biases: float) -> GuidanceNetwork:
    """Whose policy is the same everywhere: numbers 0–2, their spreads 3–5, options 6–8."""
    made = GuidanceNetwork(3, 3, 1, members=2, width=8, depth=1, generator=stream(0, "weights"))
    torch.nn.init.zeros_(made.policy.weight)
    with torch.no_grad():
        made.policy.bias[..., 3:6] = -4.0
        for column, bias in biases.items():
            made.policy.bias[..., int(column.removeprefix("c"))] = bias
    return made


def test_they_are_in_order_and_of_the_asked_count() -> None:
    designs = propose(network(c3=1.0, c4=1.0, c5=1.0), FRAME, PARENTS, 100, 2.0, stream(1, "draw"))
    assert designs.shape == (100, 4) and torch.equal(GENOME.repair(designs), designs)


def test_moves_are_the_policys() -> None:
    designs = propose(network(c0=0.5), FRAME, PARENTS[:1], 50, 2.0, stream(1, "draw"))
    moved = FRAME.numbers_of(designs) - FRAME.numbers_of(PARENTS[:1])
    torch.testing.assert_close(moved[:, 0].mean().item(), 0.5, atol=0.05, rtol=0.0)
    assert moved[:, 1].abs().max() < 0.1


def test_none_goes_farther_than_it_may() -> None:
    designs = propose(network(c0=-9.0), FRAME, PARENTS[:1], 50, 0.25, stream(1, "draw"))
    moved = FRAME.numbers_of(designs) - FRAME.numbers_of(PARENTS[:1])
    torch.testing.assert_close(moved[:, 0], torch.full((50,), -0.25, dtype=torch.float64))


def test_options_are_drawn_by_their_odds() -> None:
    designs = propose(network(c7=2.0), FRAME, PARENTS, 2000, 2.0, stream(1, "draw"))
    shares = designs[:, 1].long().bincount(minlength=3) / 2000
    expected = torch.tensor([0.0, 2.0, 0.0]).softmax(0)
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0.0)


def test_every_parent_has_its_turn() -> None:
    designs = propose(network(), FRAME, PARENTS, 1000, 2.0, stream(1, "draw"))
    nearest = (FRAME.numbers_of(designs)[:, None] - FRAME.numbers_of(PARENTS)).norm(dim=2).argmin(1)
    assert len(nearest.unique()) == len(PARENTS)
