"""What scrutineers measure. A rule is a limit; a violation grows smoothly with how far a
design is over it.

The numbers are ours, in the manner of Formula 1's rules of the 2020s.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.recipes.wing.geometry import Shape


class Rule(NamedTuple):
    name: str
    low: float  # metres, as all that is measured here
    high: float
    tolerance: float  # who is over a limit by less has kept the rule


RULES = (
    Rule("span", 0.0, 1.95, 0.010),
    Rule("length", 0.0, 0.50, 0.010),  # of the section, along the car
    Rule("lowest point", 0.05, float("inf"), 0.002),  # above the ground
    Rule("highest point", 0.0, 0.30, 0.010),  # endplates included
    Rule("slot", 0.005, 0.015, 0.001),  # at its narrowest
    Rule("endplate length", 0.0, 0.55, 0.010),
)


def violations(shape: Shape, values: Mapping[str, Tensor]) -> Tensor:
    """(designs, rules), each 0 within its limits."""
    x, y = shape.points.unbind(-1)
    lowest = y.amin((1, 2))
    measured = torch.stack(
        [
            values["span"],
            x.amax((1, 2)) - x.amin((1, 2)),
            lowest,
            torch.maximum(y.amax((1, 2)), lowest + values["endplate_height"]),  # plates start at the lowest point
            shape.clearance,
            values["endplate_length"],
        ],
        dim=1,
    )
    low, high, tolerance = (measured.new_tensor([rule[part] for rule in RULES]) for part in (1, 2, 3))
    return smooth((torch.relu(measured - high) + torch.relu(low - measured)) / tolerance)


def smooth(excess: Tensor) -> Tensor:
    """Of an excess in tolerances: a parabola at first, and far off a line, so that far offenders see the way back."""
    return torch.sqrt(1 + excess.square()) - 1


def is_kept(violations: Tensor) -> Tensor:
    """Is each row's every excess within its tolerance?"""
    return (violations <= smooth(violations.new_ones(()))).all(1)
