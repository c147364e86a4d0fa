"""The wing's downforce and drag in newtons, out of panels, span and boundary layer.

Where the flow has come off, Kirchhoff's factor ((1 + √f) / 2)² is left of an element's force, f being the share of its
surface that is still attached; of the suction at its nose √f is left, and the rest is drag. The flap holds up the main
element's circulation, so the main element suffers the flap's separation as well as its own.

The forces are those of a clean model in still air, and larger than a real wing's: friction that does not separate takes
nothing from them here, though it would take about a tenth; wheels, nose and the car behind are not there.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.recipes.wing.friction import layer
from lockstep.recipes.wing.panels import forces, solve
from lockstep.recipes.wing.span import with_wash

_STEEPEST = 0.5  # rad: the angle to which the lost nose suction is taken to turn, at most


class Air(NamedTuple):
    speed: float = 60.0  # m/s
    density: float = 1.225  # kg/m³
    kinematic_viscosity: float = 1.46e-5  # m²/s

    @property
    def dynamic_pressure(self) -> float:
        return 0.5 * self.density * self.speed**2


class Loads(NamedTuple):
    """Of each design, in newtons; `attached` and `downforce_by_element` have a column an element."""

    downforce: Tensor
    drag: Tensor
    induced: Tensor
    profile: Tensor
    separated: Tensor
    plates: Tensor
    downforce_by_element: Tensor
    attached: Tensor
    speeds: Tensor  # (designs, elements, points), shares of the free stream's
    wash: Tensor


def loads(points: Tensor, chords: Tensor, span: Tensor, plate_height: Tensor, plate_length: Tensor, air: Air) -> Loads:
    speeds, wash = with_wash(points, solve(points), span, plate_height, plate_length)
    ideal = forces(points, speeds, wash).downforce
    momentum_loss, attached = layer(points, speeds, air.kinematic_viscosity, air.speed)
    root = attached.sqrt()
    factor = ((1 + root) / 2).square()
    factor = torch.stack([factor[:, 0] * factor[:, 1], factor[:, 1]], dim=1)
    real = ideal * factor
    newtons = air.dynamic_pressure * span
    angle = (ideal / (2 * math.pi * chords)).abs().clamp(max=_STEEPEST)
    downforce = newtons * real.sum(1)
    induced = downforce * wash * (real.abs().sum(1) / ideal.abs().sum(1))  # less force, less wash
    profile = newtons * 2 * momentum_loss.sum(1)
    separated = newtons * (real.abs() * angle * (1 - root)).sum(1)
    plates = air.dynamic_pressure * 4 * plate_height * plate_length * _plate_friction(plate_length, air)
    drag = induced + profile + separated + plates
    by_element = newtons.unsqueeze(1) * real
    return Loads(downforce, drag, induced, profile, separated, plates, by_element, attached, speeds, wash)


def _plate_friction(length: Tensor, air: Air) -> Tensor:
    """Of a turbulent flat plate, Prandtl's power law."""
    return 0.074 * (air.speed * length / air.kinematic_viscosity) ** -0.2
