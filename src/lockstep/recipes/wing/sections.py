"""Sections after the NACA modified four-digit family (NACA Report 492), with sharp trailing edges.

A section has a mean line of two parabolas and a thickness that is laid normal to it. All lengths are shares of the
chord, and every parameter is a column: a value for each design.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

THICKEST_AT = (0.3, 0.4, 0.5)
"""Where along the chord the thickness may be greatest: the report gives slopes of the trailing edge for these."""

_NOSE = 1.4845  # of √x: the nose radius of the original four-digit sections
_TAIL_SLOPES = {0.3: 1.170, 0.4: 1.575, 0.5: 2.325}  # per unit of thickness


class Section(NamedTuple):
    camber: Tensor
    camber_at: Tensor
    thickness: Tensor
    thickest: Tensor  # which of THICKEST_AT


def outline(section: Section, num_panels: int) -> Tensor:
    """Points from the trailing edge along the cambered side to the nose and back: (designs, num_panels + 1, 2).

    The cambered side is at positive y. The points lie close together at both ends.
    """
    turn = 2 * math.pi * torch.arange(num_panels + 1, dtype=torch.float64) / num_panels
    x = 0.5 * (1 + torch.cos(turn))
    side = torch.where(torch.arange(num_panels + 1) < num_panels / 2, 1.0, -1.0)
    camber, slope = mean_line(section, x)
    half = half_thickness(section, x) * side
    length = torch.sqrt(1 + slope * slope)
    return torch.stack([x - half * slope / length, camber + half / length], dim=-1)


def suction_height(section: Section, x: Tensor) -> Tensor:
    """How high the cambered side lies over the chord at one station x for each design."""
    at = x.clamp(0, 1).unsqueeze(1)
    return (mean_line(section, at)[0] + half_thickness(section, at)).squeeze(1)


def mean_line(section: Section, x: Tensor) -> tuple[Tensor, Tensor]:
    """Its height and its slope."""
    most, at = section.camber.unsqueeze(1), section.camber_at.unsqueeze(1)
    is_fore = x < at
    scale = most / torch.where(is_fore, at, 1 - at) ** 2
    start = torch.where(is_fore, 0.0, 1 - 2 * at)
    return scale * (start + 2 * at * x - x * x), 2 * scale * (at - x)


def half_thickness(section: Section, x: Tensor) -> Tensor:
    which = section.thickest.long()
    fore, aft = _FORE[which].unsqueeze(2), _AFT[which].unsqueeze(2)
    root, rest = torch.sqrt(x), 1 - x
    front = _NOSE * root + x * (fore[:, 0] + x * (fore[:, 1] + x * fore[:, 2]))
    back = rest * (aft[:, 0] + rest * (aft[:, 1] + rest * aft[:, 2]))
    is_front = x < torch.tensor(THICKEST_AT, dtype=torch.float64)[which].unsqueeze(1)
    return section.thickness.unsqueeze(1) * torch.where(is_front, front, back)


def _coefficients(at: float) -> tuple[list[float], list[float]]:
    """Of the polynomials before and behind the thickest place, where both are ½ with no slope and equal curvature."""
    tail, length = _TAIL_SLOPES[at], 1 - at
    second, third = (1.5 - 2 * tail * length) / length**2, (tail * length - 1) / length**3
    curvature = 2 * second + 6 * third * length
    equations = torch.tensor([[at, at**2, at**3], [1, 2 * at, 3 * at**2], [0, 2, 6 * at]], dtype=torch.float64)
    root = math.sqrt(at)
    wanted = torch.tensor(
        [0.5 - _NOSE * root, -_NOSE / (2 * root), curvature + _NOSE / (4 * root**3)], dtype=torch.float64
    )
    return torch.linalg.solve(equations, wanted).tolist(), [tail, second, third]


_FORE, _AFT = (torch.tensor(rows, dtype=torch.float64) for rows in zip(*map(_coefficients, THICKEST_AT), strict=True))
