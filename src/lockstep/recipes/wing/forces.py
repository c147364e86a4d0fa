"""Downforce and drag of the wing in newtons: panels, trailing vortices of a finite span, boundary layer.

**Span.** Lifting-line theory with one station: the trailing vortices send a uniform wash through the wing, against its
force, of 2Γ / (π b) for a circulation Γ and a span b. Endplates act as a larger span, by Hoerner's rule (1 + 1.9 ×
height / span); the vortices' images in the ground cancel part of the wash, by McCormick's factor. To the section, the
wash is a stream at an angle, which the panels solve too. Not modelled: how the load falls off towards the tips,
vortices below the endplates, the wheels and the car.

**Boundary layer.** Turbulent from the start, as on a wing behind other cars: Buri's closed form of the momentum
equation, θ (Uθ/ν)^¼ = 0.016 U⁻⁴ ∫U⁴ ds from the stagnation point. It separates where (θ/U) dU/ds (Uθ/ν)^¼ falls below
−0.06. This does not predict the stall behind a sharp suction peak at a nose; Valarezo and Chin's rule does: no element
recovers more than a certain pressure (their limit grows with the Reynolds number; ours is its lower end). Squire and
Young's formula turns the momentum loss at the trailing edge into drag. Not modelled: laminar flow, the main element's
wake on the flap, the layer on the ground, and the layer's effect on the pressure other than by separation.

**Separation.** With an attached share f of its surface, an element keeps Kirchhoff's factor ((1 + √f) / 2)² of its
force, and √f of the suction at its nose; the rest of the suction becomes drag. The flap sustains the main element's
circulation, so separation on the flap costs the main element force too.

The forces are those of a clean model in still air, and larger than a real wing's: without separation, friction does not
reduce the downforce here, though in reality it would by about a tenth.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.recipes.wing.panels import Flow, circulation, forces, solve

_ENDPLATE = 1.9  # Hoerner, for plates at both tips
_GROUND = 16.0  # McCormick, of the height over the span


class SpanFlow(NamedTuple):
    """The flow around a wing of finite span."""

    speeds: Tensor  # (designs, elements, points), with the wash
    wash: Tensor  # (designs,), upwards, as a share of the free stream


def with_wash(points: Tensor, flow: Flow, span: Tensor, plate_height: Tensor, plate_length: Tensor) -> SpanFlow:
    """Add the wash of the trailing vortices to a plane flow."""
    length = points[..., 0].amax((1, 2)) - points[..., 0].amin((1, 2))
    cover = (plate_length / length).clamp(max=1.0)  # a plate shorter than the wing has a smaller effect
    far_span = span + _ENDPLATE * plate_height * cover
    height = points[..., 1].mean((1, 2))
    near = (_GROUND * height / span).square()
    per_circulation = 2 * near / (1 + near) / (math.pi * far_span)
    level, upward = circulation(points, flow.level), circulation(points, flow.upward)
    wash = -per_circulation * level / (1 + per_circulation * upward)
    return SpanFlow(flow.level + wash[:, None, None] * flow.upward, wash)


_GROWTH = 0.016  # Buri
_SEPARATION = 0.06  # Buri
_MAX_RECOVERY = 8.0  # of the pressure coefficient, before the trailing edge
_SOFTNESS = 0.15  # width of the transition from attached to separated, as a share of the limit
_MIN_SPEED = 1e-3  # of the free stream: at the stagnation point the layer is too thin to matter
_TAIL = 0.03  # of the chord, before the trailing edge: the stagnation there exists only without friction
_WAKE = 3.2  # Squire and Young's exponent, (H + 5) / 2 for H = 1.4


class BoundaryLayer(NamedTuple):
    """The boundary layer of each element, (designs, elements)."""

    momentum_loss: Tensor  # momentum thickness far downstream, both sides: half the drag per dynamic pressure
    attached: Tensor  # share of the surface before separation, on the worse side


def boundary_layer(points: Tensor, speeds: Tensor, kinematic_viscosity: float, stream_speed: float) -> BoundaryLayer:
    """Compute the boundary layer for `points` in metres and `speeds` as shares of `stream_speed`, in m/s."""
    lengths = points.diff(dim=2).norm(dim=-1)
    start, end = speeds[..., :-1], speeds[..., 1:]
    # The speed is linear between corners, so the integral of its fourth power is exact, even where the sign changes.
    fourth = (start**4 + start**3 * end + start**2 * end**2 + start * end**3 + end**4) / 5 * lengths
    total = torch.nn.functional.pad(fourth.cumsum(-1), (1, 0))
    turn = _turn(start, end)
    before_turn = (start.abs() ** 5 / (start.abs() + end.abs()).clamp_min(_MIN_SPEED) / 5 * lengths).gather(2, turn)
    run = (total - total.gather(2, turn) - before_turn).abs()
    speed = speeds.abs().clamp_min(_MIN_SPEED)
    thickness = (_GROWTH * run / speed**4 * (kinematic_viscosity / (speed * stream_speed)) ** 0.25) ** 0.8

    panel = torch.arange(lengths.shape[-1])
    downstream = (panel > turn).double() - (panel < turn).double()  # flow direction; 0 where it divides
    slope = downstream * (speed[..., 1:] - speed[..., :-1]) / lengths
    middle = (speed[..., 1:] + speed[..., :-1]) / 2
    load = -_GROWTH * (run[..., :-1] + run[..., 1:]) / 2 * slope / middle**5
    tail = _tail(speeds.shape[-1])
    to_recover = middle.square() - (speed[..., tail] * speed[..., -1 - tail]).unsqueeze(-1)
    worst = torch.maximum(load / _SEPARATION, to_recover / _MAX_RECOVERY)
    over = torch.sigmoid((worst - 1) / _SOFTNESS)

    is_inside = (panel >= tail) & (panel < len(panel) - tail)
    below, above = (is_inside & (downstream == way) for way in (-1, 1))
    attached = torch.minimum(
        _attached(over.flip(-1), lengths.flip(-1), below.flip(-1)), _attached(over, lengths, above)
    )
    at_ends = thickness[..., [tail, -1 - tail]] * speed[..., [tail, -1 - tail]] ** _WAKE
    return BoundaryLayer(at_ends.sum(-1), attached)


def _turn(start: Tensor, end: Tensor) -> Tensor:
    """The panel with the stagnation point, where the flow divides: (designs, elements, 1)."""
    return ((start < 0) & (end >= 0)).to(torch.int8).argmax(-1, keepdim=True)


def _attached(over: Tensor, lengths: Tensor, is_side: Tensor) -> Tensor:
    """The share of a side's length before separation. Separated flow does not reattach."""
    still_on = 1 - (over * is_side).cummax(-1).values
    length = lengths * is_side
    return (still_on * length).sum(-1) / length.sum(-1).clamp_min(_MIN_SPEED * _MIN_SPEED)


def _tail(num_points: int) -> int:
    """The number of corners within `_TAIL` of the trailing edge."""
    turn = torch.acos(torch.tensor(1 - 2 * _TAIL, dtype=torch.float64)) * (num_points - 1) / (2 * torch.pi)
    return max(1, int(turn.ceil()))


_MAX_ANGLE = 0.5  # rad: the largest angle by which lost nose suction is turned into drag


class Air(NamedTuple):
    """The state of the air, and the speed of the car."""

    speed: float = 60.0  # m/s
    density: float = 1.225  # kg/m³
    kinematic_viscosity: float = 1.46e-5  # m²/s

    @property
    def dynamic_pressure(self) -> float:
        return 0.5 * self.density * self.speed**2


class Loads(NamedTuple):
    """Forces on each design in newtons; `attached` and `downforce_by_element` have a column per element."""

    downforce: Tensor
    drag: Tensor  # the sum of the next four
    induced: Tensor  # by the wash
    profile: Tensor  # by the boundary layer
    separated: Tensor  # by lost nose suction
    plates: Tensor  # by friction on the endplates
    downforce_by_element: Tensor
    attached: Tensor
    speeds: Tensor  # (designs, elements, points), relative to the free stream
    wash: Tensor


def loads(points: Tensor, chords: Tensor, span: Tensor, plate_height: Tensor, plate_length: Tensor, air: Air) -> Loads:
    """Compute all forces on wings, given their outlines and dimensions in metres."""
    speeds, wash = with_wash(points, solve(points), span, plate_height, plate_length)
    ideal = forces(points, speeds, wash).downforce
    momentum_loss, attached = boundary_layer(points, speeds, air.kinematic_viscosity, air.speed)
    root = attached.sqrt()
    factor = ((1 + root) / 2).square()
    factor = torch.stack([factor[:, 0] * factor[:, 1], factor[:, 1]], dim=1)
    real = ideal * factor
    newtons = air.dynamic_pressure * span
    angle = (ideal / (2 * math.pi * chords)).abs().clamp(max=_MAX_ANGLE)
    downforce = newtons * real.sum(1)
    induced = downforce * wash * (real.abs().sum(1) / ideal.abs().sum(1))  # a smaller force causes less wash
    profile = newtons * 2 * momentum_loss.sum(1)
    separated = newtons * (real.abs() * angle * (1 - root)).sum(1)
    plates = air.dynamic_pressure * 4 * plate_height * plate_length * _plate_friction(plate_length, air)
    drag = induced + profile + separated + plates
    by_element = newtons.unsqueeze(1) * real
    return Loads(downforce, drag, induced, profile, separated, plates, by_element, attached, speeds, wash)


def _plate_friction(length: Tensor, air: Air) -> Tensor:
    """The friction coefficient of a turbulent flat plate, by Prandtl's power law."""
    return 0.074 * (air.speed * length / air.kinematic_viscosity) ** -0.2
