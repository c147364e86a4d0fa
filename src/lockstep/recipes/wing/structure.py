"""Is it stiff and strong enough? Each half of the wing is a beam, held at the nose's pylon, under an even load.

The elements are hollow shells of carbon fibre; they bend together, each about its own middle. Left out: torsion,
buckling, the joints, and what the endplates' own load does.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

PYLON_M = 0.15  # from the middle of the car to where the wing is held
PLY_M = 0.25e-3
PLATE_M = 3e-3  # an endplate's thickness


class Carbon(NamedTuple):
    """A laminate of many directions."""

    stiffness_pa: float
    strength_pa: float
    density: float  # kg/m³


CARBONS: Mapping[str, Carbon] = {
    "standard": Carbon(60e9, 500e6, 1550.0),
    "high_modulus": Carbon(95e9, 320e6, 1620.0),
}


class Strain(NamedTuple):
    deflection_m: Tensor  # of the tips
    stress_share: Tensor  # of the laminate's strength
    mass_kg: Tensor


def strain(points: Tensor, values: Mapping[str, Tensor], load_n: Tensor) -> Strain:
    """`points` of the section in metres, `load_n` the whole wing's force."""
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
