"""The flow around the elements by a vortex panel method, with the ground as a mirror image.

Panels have linear vortex strength. The stream function is constant on each element, required at every corner of its
outline; the speed at a corner is then the vortex strength itself. Every vortex has an image of opposite strength below
the ground, so that the stream function is zero along it. At a sharp trailing edge two corners coincide: there the Kutta
condition (equal speeds on both sides) and an extrapolation of the mean speed replace the two equal equations.

The flow is plane, steady, inviscid and incompressible. Speeds are relative to the free stream, lengths are in metres.
Designs are solved many at a time; one without a solution becomes NaN and does not affect the others.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_BATCH = 8  # designs: intermediate values then stay in the processor's cache
_MAX_SPEED = 1e3  # relative to the free stream
_TINY = 1e-300  # so that the logarithm of a corner's distance to itself, times that distance, is zero


class Flow(NamedTuple):
    """Speeds along the outlines, clockwise positive, in a stream along the ground and in one vertically upwards.

    Each is (designs, elements, points). Any stream is a combination of these two.
    """

    level: Tensor
    upward: Tensor


class Forces(NamedTuple):
    """Forces on each element, (designs, elements), per dynamic pressure and metre of span."""

    downforce: Tensor
    drag: Tensor  # of pressure: zero in a plane inviscid flow, except for discretization errors
    moment: Tensor  # about the origin; positive is nose down


def solve(points: Tensor, *, ground: bool = True) -> Flow:
    """Solve for the flow; `points`: (designs, elements, points, 2), clockwise from the trailing edge, above ground."""
    flows = [_solve(some, ground) for some in torch.split(points, _BATCH)]
    return Flow(*map(torch.cat, zip(*flows, strict=True)))


def _solve(points: Tensor, ground: bool) -> Flow:
    num_designs, num_elements, num_points, _ = points.shape
    size = num_elements * num_points
    corners = points.flatten(1, 2)
    matrix = corners.new_zeros(num_designs, size + num_elements, size + num_elements)
    matrix[:, :size, :size] = stream_function(points, corners, ground=ground)
    wanted = corners.new_zeros(num_designs, size + num_elements, 2)
    wanted[:, :size, 0], wanted[:, :size, 1] = -corners[..., 1], corners[..., 0]
    for element in range(num_elements):
        first, last = element * num_points, (element + 1) * num_points - 1
        matrix[:, first:last, size + element] = -1.0  # the element's own constant
        matrix[:, last] = wanted[:, last] = 0.0
        # The mean speed at the trailing edge is extrapolated from the two corners before it, 1 and 4 units away.
        for corner, weight in ((0, 1.0), (1, -4 / 3), (2, 1 / 3)):
            matrix[:, last, first + corner] = weight
            matrix[:, last, last - corner] = -weight
        matrix[:, size + element, first] = matrix[:, size + element, last] = 1.0  # Kutta
    solution, failed = torch.linalg.solve_ex(matrix, wanted)
    speeds = solution[:, :size]
    # Rounding can hide that a matrix is singular; then the speeds are absurd.
    is_solved = (failed == 0) & (speeds.abs().amax((1, 2)) < _MAX_SPEED)
    speeds = torch.where(is_solved[:, None, None], speeds, math.nan)
    level, upward = speeds.reshape(num_designs, num_elements, num_points, 2).unbind(-1)
    return Flow(level, upward)


def pressure(speeds: Tensor, wash: Tensor | None = None) -> Tensor:
    """Return the pressure coefficient, in a stream of speed 1 along the ground and `wash` upwards."""
    return _at_rest(wash) - speeds.square()


def forces(points: Tensor, speeds: Tensor, wash: Tensor | None = None) -> Forces:
    """Integrate the pressure. Between corners the speed is linear, so the integral of its square is exact."""
    start, end = speeds[..., :-1], speeds[..., 1:]
    mean_pressure = _at_rest(wash) - (start * start + start * end + end * end) / 3
    dx, dy = points.diff(dim=2).unbind(-1)
    x, y = ((points[:, :, :-1] + points[:, :, 1:]) / 2).unbind(-1)
    along_x, along_y = mean_pressure * dy, -mean_pressure * dx
    return Forces(-along_y.sum(2), along_x.sum(2), (x * along_y - y * along_x).sum(2))


def _at_rest(wash: Tensor | None) -> Tensor:
    """The pressure coefficient at a stagnation point."""
    return torch.ones(()) if wash is None else 1.0 + wash.square().reshape(-1, 1, 1)


def circulation(points: Tensor, speeds: Tensor) -> Tensor:
    """Return the circulation of the whole wing, clockwise, (designs,)."""
    lengths: Tensor = points.diff(dim=2).norm(dim=-1)
    return (lengths * (speeds[..., :-1] + speeds[..., 1:]) / 2).sum((1, 2))


def velocity(points: Tensor, speeds: Tensor, places: Tensor, *, ground: bool = True) -> Tensor:
    """Return the velocity in a level stream at places (designs, places, 2) off the outlines, by finite differences."""
    step = 1e-6

    def stream(dx: float, dy: float) -> Tensor:
        at = places + places.new_tensor([dx, dy])
        vortices = stream_function(points, at, ground=ground) @ speeds.flatten(1).unsqueeze(-1)
        return at[..., 1] + vortices.squeeze(-1)

    along = stream(0, step) - stream(0, -step)
    upwards = stream(-step, 0) - stream(step, 0)
    return torch.stack([along, upwards], dim=-1) / (2 * step)


def stream_function(points: Tensor, places: Tensor, *, ground: bool) -> Tensor:
    """Return the stream function at each place for unit vortex strength at each corner: (designs, places, corners)."""
    real = _without_ground(points, places)
    if ground:
        real -= _without_ground(points, places * places.new_tensor([1.0, -1.0]))
    return real


def _without_ground(points: Tensor, places: Tensor) -> Tensor:
    """Each panel contributes to the corners at its start and its end.

    With u measured along the panel to the foot of the place, v its distance off it, w = u² + v²:
    ∫ ln r ds = ½ [u ln w − 2u + 2v·atan(u / v)] and ∫ u ln r ds = ¼ [w (ln w − 1)], between the panel's ends.
    """
    side = points.diff(dim=2)
    length = side.norm(dim=-1)
    tangent_x, tangent_y = (side / length.unsqueeze(-1)).unsqueeze(1).unbind(-1)
    length = length.unsqueeze(1)
    dx = places[:, :, None, None, 0] - points[:, None, ..., 0]
    dy = places[:, :, None, None, 1] - points[:, None, ..., 1]
    squared = (dx * dx).addcmul_(dy, dy).clamp_min_(_TINY)
    logarithm = squared.log()
    moment = (logarithm - 1).mul_(squared).mul_(0.25)
    dx, dy = dx[..., :-1], dy[..., :-1]
    from_start = (dx * tangent_x).addcmul_(dy, tangent_y)
    off = (dy * tangent_x).addcmul_(dx, tangent_y, value=-1)
    from_end = from_start - length
    # The angle under which the panel is seen; it jumps where the place is on the panel, but is multiplied by v.
    angle = torch.atan2(off * length, (off * off).addcmul_(from_start, from_end))
    whole = (off * angle).sub_(length)
    whole.addcmul_(from_start, logarithm[..., :-1], value=0.5).addcmul_(from_end, logarithm[..., 1:], value=-0.5)
    to_end = from_start.mul_(whole).sub_(moment[..., :-1]).add_(moment[..., 1:]).div_(length)
    strengths = torch.zeros_like(logarithm)
    strengths[..., :-1] = whole.sub_(to_end)
    strengths[..., 1:] += to_end
    return strengths.flatten(2).mul_(1 / (2 * math.pi))
