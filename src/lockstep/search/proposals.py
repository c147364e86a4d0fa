"""Designs that the guidance network thinks up itself: its policy's moves from designs that were evaluated."""

import torch
from torch import Tensor

from lockstep.search.frame import Frame
from lockstep.search.network import GuidanceNetwork


def propose(
    network: GuidanceNetwork, frame: Frame, parents: Tensor, count: int, reach: float, generator: torch.Generator
) -> Tensor:
    """So many designs, each a move of any member's policy from any of the parents.

    It is no farther from its parent than `reach` in any number: near to what it has seen the network can be trusted.
    """
    with torch.no_grad():
        outlook = network(frame.features(parents).to(network.device))
    members = torch.randint(len(outlook.moves), (count,), generator=generator)
    rows = torch.randint(len(parents), (count,), generator=generator)
    moves, spreads, options = (
        part.cpu()[members, rows].double() for part in (outlook.moves, outlook.spreads, outlook.options)
    )
    noise = torch.randn(moves.shape, generator=generator, dtype=torch.float64)
    moves = (moves + spreads.exp() * noise).clamp(-reach, reach)
    return frame.designs(frame.numbers_of(parents)[rows] + moves, _draw_options(frame, options, generator))


def _draw_options(frame: Frame, log_odds: Tensor, generator: torch.Generator) -> Tensor:
    """A column for each choice: the number of an option, drawn by its odds."""
    drawn = torch.rand(log_odds.shape, generator=generator, dtype=torch.float64).clamp(min=1e-300)
    # Of log-odds with a Gumbel deviate added to each, the largest is a draw by the odds.
    perturbed = log_odds - (-drawn.log()).log()
    chosen = torch.empty(len(log_odds), len(frame.choices), dtype=torch.float64)
    parts = perturbed.split(frame.option_sizes, 1)  # type: ignore[no-untyped-call]
    for column, part in enumerate(parts):
        chosen[:, column] = part.argmax(1).double()
    return chosen
