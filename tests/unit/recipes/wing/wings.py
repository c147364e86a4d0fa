"""Wings and sections for the tests of the wing recipe."""

import math
from typing import Any

import torch
from torch import Tensor

from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.genes import BASE
from lockstep.recipes.wing.geometry import AirfoilSection, outline


def column(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def section(camber: float, camber_at: float, thickness: float, thickest: int = 0) -> AirfoilSection:
    return AirfoilSection(column(camber), column(camber_at), column(thickness), column(thickest))


def upright(form: AirfoilSection, degrees: float, num_panels: int, *, height: float = 0.0) -> Tensor:
    """Return a section of chord 1, upright, nose up by an angle, its nose at a height: (1, 1, points, 2)."""
    angle = math.radians(degrees)
    x, y = outline(form, num_panels).flip(1).unbind(-1)
    turned = torch.stack(
        [x * math.cos(angle) + y * math.sin(angle), y * math.cos(angle) - x * math.sin(angle) + height], dim=-1
    )
    return turned.unsqueeze(1)


def upside_down(form: AirfoilSection, degrees: float, num_panels: int, *, height: float) -> Tensor:
    """Return its mirror image, its nose at a height over the ground."""
    mirrored = upright(form, degrees, num_panels) * torch.tensor([1.0, -1.0], dtype=torch.float64)
    return mirrored.flip(2) + torch.tensor([0.0, height], dtype=torch.float64)


def design(**changes: Any) -> Tensor:
    """Return the base design with other genes, as a population of one."""
    return Assessor().genome.row({**BASE, **changes}).unsqueeze(0)
