"""Where the two elements stand: the wing's section over the ground, in metres.

x points downstream and y up; the ground is y = 0. The wing is upside down: its cambered sides face the ground. Points
run clockwise, from an element's trailing edge along its underside to the nose and back along the upper side.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.recipes.wing.sections import Section, outline, suction_height

ELEMENTS = ("main", "flap")


class Shape(NamedTuple):
    """Of each design, (designs, 2 elements, points, 2 coordinates), and what the rules ask about it."""

    points: Tensor
    chords: Tensor  # (designs, 2)
    clearance: Tensor  # the narrowest place between the elements
    is_possible: Tensor  # the elements do not run into each other


def shape(values: Mapping[str, Tensor], num_panels: int) -> Shape:
    """The wing that SI values by the genes' names describe."""
    chords = torch.stack([values[f"{name}_chord"] for name in ELEMENTS], dim=1)
    sections = [_section(values, name) for name in ELEMENTS]
    main = _rotated(outline(sections[0], num_panels) * chords[:, :1, None], values["main_angle"])
    # The slot: the main element's trailing edge lies so far behind the flap's nose, along the flap's chord, and so far
    # off its surface there, at a right angle to the chord.
    overlap = values["slot_overlap"]
    off = values["slot_gap"] + chords[:, 1] * suction_height(sections[1], overlap / chords[:, 1])
    flap = outline(sections[1], num_panels) * chords[:, 1:, None] - torch.stack([overlap, off], dim=1).unsqueeze(1)
    flap = _rotated(flap, values["main_angle"] + values["flap_angle"]) + main[:, :1]
    points = torch.stack([main, flap], dim=1) * torch.tensor([1.0, -1.0], dtype=torch.float64)
    lowest = points[..., 1].amin((1, 2))
    points[..., 1] += (values["ride_height"] - lowest)[:, None, None]
    meeting = _meeting(*points.unbind(1))
    return Shape(points, chords, meeting.clearance, ~meeting.is_crossing)


def _section(values: Mapping[str, Tensor], name: str) -> Section:
    camber, camber_at, thickness = (values[f"{name}_{part}"] for part in ("camber", "camber_at", "thickness"))
    return Section(camber, camber_at, thickness, values.get(f"{name}_thickest", torch.zeros_like(camber)))


def _rotated(points: Tensor, angle: Tensor) -> Tensor:
    """About the origin, with the nose going up."""
    sine, cosine = torch.sin(angle)[:, None], torch.cos(angle)[:, None]
    x, y = points.unbind(-1)
    return torch.stack([x * cosine + y * sine, y * cosine - x * sine], dim=-1)


class _Meeting(NamedTuple):
    clearance: Tensor
    is_crossing: Tensor


def _meeting(main: Tensor, flap: Tensor) -> _Meeting:
    """The least distance between two outlines, and whether any side of one cuts one of the other."""
    flap_off, to_main = _seen_from(main, flap)
    main_off, to_flap = _seen_from(flap, main)
    # A side is cut where the other outline's corners before and behind lie on two sides of it, and the other way round.
    cuts = (flap_off[..., :-1] * flap_off[..., 1:] <= 0) & (main_off[..., :-1] * main_off[..., 1:] <= 0).mT
    return _Meeting(torch.minimum(to_main, to_flap).sqrt(), cuts.any(2).any(1))


def _seen_from(outline: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """How far off each side's line each point lies, times the side's length; and the least squared distance of all."""
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
