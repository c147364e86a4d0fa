"""The limits of a wing: rules on its dimensions, and stiffness, strength and mass of its structure.

A violation grows smoothly with how far a design exceeds a limit. The rules are our own, in the style of Formula 1's in
the 2020s. For the structure, each half of the wing is a beam held at the nose's pylon, under a uniform load; the
elements are hollow shells of carbon fibre that bend together, each about its own centre line. Not modelled: torsion,
buckling, the joints, and the load on the endplates.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.recipes.wing.geometry import WingShape


class WingRule(NamedTuple):
    """A range for a dimension in metres."""

    name: str
    low: float
    high: float
    tolerance: float  # exceeding a limit by less still keeps the rule


WING_RULES = (
    WingRule("span", 0.0, 1.95, 0.010),
    WingRule("length", 0.0, 0.50, 0.010),  # of the section, along the car
    WingRule("lowest point", 0.05, float("inf"), 0.002),  # above the ground
    WingRule("highest point", 0.0, 0.30, 0.010),  # endplates included
    WingRule("slot", 0.005, 0.015, 0.001),  # at its narrowest
    WingRule("endplate length", 0.0, 0.55, 0.010),
)


def violations(shape: WingShape, values: Mapping[str, Tensor]) -> Tensor:
    """Return the violation of each rule, (designs, rules), 0 within its limits."""
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
    low, high, tolerance = (measured.new_tensor([rule[part] for rule in WING_RULES]) for part in (1, 2, 3))
    return smooth((torch.relu(measured - high) + torch.relu(low - measured)) / tolerance)


def smooth(excess: Tensor) -> Tensor:
    """Map an excess, in tolerances, to a violation: quadratic at first, then linear."""
    return torch.sqrt(1 + excess.square()) - 1


def is_kept(violations: Tensor) -> Tensor:
    """Whether every violation of a row is within its tolerance."""
    return (violations <= smooth(violations.new_ones(()))).all(1)


PYLON_M = 0.15  # from the middle of the car to the wing's mount
PLY_M = 0.25e-3
PLATE_M = 3e-3  # an endplate's thickness


class Carbon(NamedTuple):
    """A laminate with fibres in many directions."""

    stiffness_pa: float
    strength_pa: float
    density: float  # kg/m³


CARBONS: Mapping[str, Carbon] = {
    "standard": Carbon(60e9, 500e6, 1550.0),
    "high_modulus": Carbon(95e9, 320e6, 1620.0),
}


class Strain(NamedTuple):
    """How a wing responds to its load."""

    deflection_m: Tensor  # of the tips
    stress_share: Tensor  # of the laminate's strength
    mass_kg: Tensor


def strain(points: Tensor, values: Mapping[str, Tensor], load_n: Tensor) -> Strain:
    """Compute the response; `points` of the section in metres, `load_n` the force on the whole wing."""
    laminate = torch.tensor(list(CARBONS.values()), dtype=torch.float64)[values["carbon"].long()]
    stiffness, strength, density = laminate.unbind(1)
    wall = values["plies"] * PLY_M
    span = values["span"]
    lengths = points.diff(dim=2).norm(dim=-1)
    height = (points[:, :, :-1, 1] + points[:, :, 1:, 1]) / 2
    perimeter = lengths.sum(2)
    middle = (lengths * height).sum(2) / perimeter
    off = height - middle.unsqueeze(2)
    second_moment = wall * (lengths * off.square()).sum((1, 2))
    farthest = off.abs().amax((1, 2))
    arm = span / 2 - PYLON_M
    per_metre = load_n.abs() / span
    deflection = per_metre * arm**4 / (8 * stiffness * second_moment)
    stress = per_metre * arm.square() / 2 * farthest / second_moment
    plates = 2 * values["endplate_height"] * values["endplate_length"] * PLATE_M
    return Strain(deflection, stress / strength, density * (perimeter.sum(1) * wall * span + plates))
