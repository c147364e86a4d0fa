"""The wing's geometry: airfoil sections, and the two elements placed above the ground, in metres.

Sections are of the NACA modified four-digit family (NACA Report 492), with sharp trailing edges: a mean line of two
parabolas, and a thickness added normal to it. Their lengths are shares of the chord, and every parameter is a column
with a value per design.

x points downstream and y up; the ground is y = 0. The wing is upside down: its cambered sides face the ground. Points
run clockwise, from an element's trailing edge along its underside to the nose and back along the upper side.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

THICKEST_AT = (0.3, 0.4, 0.5)
"""Where along the chord a section can be thickest: the positions for which the report gives trailing-edge slopes."""

_NOSE = 1.4845  # of √x: the nose radius of the original four-digit sections
_TAIL_SLOPES = {0.3: 1.170, 0.4: 1.575, 0.5: 2.325}  # per unit of thickness


class AirfoilSection(NamedTuple):
    """The shape of a section, as shares of its chord."""

    camber: Tensor
    camber_at: Tensor
    thickness: Tensor
    thickest: Tensor  # index into THICKEST_AT


def outline(section: AirfoilSection, num_panels: int) -> Tensor:
    """Return points from the trailing edge along the cambered side to the nose and back: (designs, num_panels + 1, 2).

    The cambered side is at positive y. The points are dense at both ends.
    """
    turn = 2 * math.pi * torch.arange(num_panels + 1, dtype=torch.float64) / num_panels
    x = 0.5 * (1 + torch.cos(turn))
    side = torch.where(torch.arange(num_panels + 1) < num_panels / 2, 1.0, -1.0)
    camber, slope = mean_line(section, x)
    half = half_thickness(section, x) * side
    length = torch.sqrt(1 + slope * slope)
    return torch.stack([x - half * slope / length, camber + half / length], dim=-1)


def suction_height(section: AirfoilSection, x: Tensor) -> Tensor:
    """Return the height of the cambered side above the chord, at one station x per design."""
    at = x.clamp(0, 1).unsqueeze(1)
    return (mean_line(section, at)[0] + half_thickness(section, at)).squeeze(1)


def mean_line(section: AirfoilSection, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the height and the slope of the mean line."""
    camber, at = section.camber.unsqueeze(1), section.camber_at.unsqueeze(1)
    is_fore = x < at
    scale = camber / torch.where(is_fore, at, 1 - at) ** 2
    start = torch.where(is_fore, 0.0, 1 - 2 * at)
    return scale * (start + 2 * at * x - x * x), 2 * scale * (at - x)


def half_thickness(section: AirfoilSection, x: Tensor) -> Tensor:
    """Return half of the thickness at x."""
    which = section.thickest.long()
    fore, aft = _FORE[which].unsqueeze(2), _AFT[which].unsqueeze(2)
    root, rest = torch.sqrt(x), 1 - x
    front = _NOSE * root + x * (fore[:, 0] + x * (fore[:, 1] + x * fore[:, 2]))
    back = rest * (aft[:, 0] + rest * (aft[:, 1] + rest * aft[:, 2]))
    is_front = x < torch.tensor(THICKEST_AT, dtype=torch.float64)[which].unsqueeze(1)
    return section.thickness.unsqueeze(1) * torch.where(is_front, front, back)


def _coefficients(at: float) -> tuple[list[float], list[float]]:
    """The polynomials before and behind the thickest point, where both are ½ with slope 0 and equal curvature."""
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


ELEMENTS = ("main", "flap")


class WingShape(NamedTuple):
    """The outlines of each design, (designs, 2 elements, points, 2 coordinates), and what follows from them."""

    points: Tensor
    chords: Tensor  # (designs, 2)
    clearance: Tensor  # (designs,): the smallest distance between the elements
    is_possible: Tensor  # (designs,): the elements do not intersect


def shape(values: Mapping[str, Tensor], num_panels: int) -> WingShape:
    """Build the wings described by columns of SI values, by gene."""
    chords = torch.stack([values[f"{name}_chord"] for name in ELEMENTS], dim=1)
    sections = [_section(values, name) for name in ELEMENTS]
    main = _rotated(outline(sections[0], num_panels) * chords[:, :1, None], values["main_angle"])
    # The slot: the main element's trailing edge lies `overlap` behind the flap's nose, along the flap's chord, and
    # `slot_gap` off its surface there, at a right angle to the chord.
    overlap = values["slot_overlap"]
    off = values["slot_gap"] + chords[:, 1] * suction_height(sections[1], overlap / chords[:, 1])
    flap = outline(sections[1], num_panels) * chords[:, 1:, None] - torch.stack([overlap, off], dim=1).unsqueeze(1)
    flap = _rotated(flap, values["main_angle"] + values["flap_angle"]) + main[:, :1]
    points = torch.stack([main, flap], dim=1) * torch.tensor([1.0, -1.0], dtype=torch.float64)
    lowest = points[..., 1].amin((1, 2))
    points[..., 1] += (values["ride_height"] - lowest)[:, None, None]
    gap = _gap(*points.unbind(1))
    return WingShape(points, chords, gap.clearance, ~gap.is_crossing)


def _section(values: Mapping[str, Tensor], name: str) -> AirfoilSection:
    camber, camber_at, thickness = (values[f"{name}_{part}"] for part in ("camber", "camber_at", "thickness"))
    return AirfoilSection(camber, camber_at, thickness, values.get(f"{name}_thickest", torch.zeros_like(camber)))


def _rotated(points: Tensor, angle: Tensor) -> Tensor:
    """Rotate about the origin, nose up."""
    sine, cosine = torch.sin(angle)[:, None], torch.cos(angle)[:, None]
    x, y = points.unbind(-1)
    return torch.stack([x * cosine + y * sine, y * cosine - x * sine], dim=-1)


class _Gap(NamedTuple):
    clearance: Tensor
    is_crossing: Tensor


def _gap(main: Tensor, flap: Tensor) -> _Gap:
    """The smallest distance between two outlines, and whether any side of one crosses a side of the other."""
    flap_off, to_main = _seen_from(main, flap)
    main_off, to_flap = _seen_from(flap, main)
    # Two sides cross if the ends of each lie on different sides of the other.
    cuts = (flap_off[..., :-1] * flap_off[..., 1:] <= 0) & (main_off[..., :-1] * main_off[..., 1:] <= 0).mT
    return _Gap(torch.minimum(to_main, to_flap).sqrt(), cuts.any(2).any(1))


def _seen_from(outline: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """The distance of each point from each side's line, times the side's length; and the smallest squared distance."""
    side_x, side_y = outline.diff(dim=1).unsqueeze(2).unbind(-1)
    start_x, start_y = outline[:, :-1].unsqueeze(2).unbind(-1)
    x, y = points.unsqueeze(1).unbind(-1)
    x, y = x - start_x, y - start_y
    off = side_x * y - side_y * x
    along = side_x * x + side_y * y
    length_squared = side_x.square() + side_y.square()
    is_beside = (along >= 0) & (along <= length_squared)
    to_side = torch.where(is_beside, off.square() / length_squared, torch.inf)
    return off, torch.minimum(to_side, x.square() + y.square()).amin((1, 2))
