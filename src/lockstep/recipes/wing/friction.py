"""The boundary layer on the panels' speeds: its momentum loss, and how far along the surface it stays attached.

Turbulent from the start, as on a wing behind other cars: Buri's closed form of the momentum equation,
θ (Uθ/ν)^¼ = 0.016 U⁻⁴ ∫U⁴ ds from the stagnation point. It separates where (θ/U) dU/ds (Uθ/ν)^¼ falls below −0.06. A
sharp suction peak at a nose ends in a stall that this cannot see; for that there is Valarezo and Chin's rule, that no
element recovers more than a certain pressure. Their limit grows with the Reynolds number; ours is the lower end of it.
Squire and Young's formula makes drag of the momentum loss at the trailing edge. All is in closed form: there is no
march that could break.

Left out: laminar stretches, the main element's wake on the flap, the layer on the ground, and how the layer in its turn
changes the pressure (but for what separation takes away, see forces.py).
"""

from typing import NamedTuple

import torch
from torch import Tensor

_GROWTH = 0.016
_SEPARATION = 0.06
_RECOVERY = 8.0  # of the pressure coefficient, from any suction to the trailing edge
_SOFTNESS = 0.15  # of the separation limit: over so much of it, "attached" turns into "separated"
_SLOWEST = 1e-3  # of the free stream: at the stagnation point the layer is too thin to matter
_TAIL = 0.03  # of the chord: there a flow without friction stops, and a real one does not
_WAKE = 3.2  # Squire and Young's exponent, (H + 5) / 2 for H = 1.4


class Layer(NamedTuple):
    """Of each element, (designs, elements)."""

    momentum_loss: Tensor  # its thickness far downstream, both sides together: half the drag per dynamic pressure
    attached: Tensor  # share of the surface before separation, of the side where it is smaller


def layer(points: Tensor, speeds: Tensor, kinematic_viscosity: float, stream_speed: float) -> Layer:
    """`points` in metres; `speeds` are shares of `stream_speed`, in m/s."""
    lengths = points.diff(dim=2).norm(dim=-1)
    start, end = speeds[..., :-1], speeds[..., 1:]
    # Of speeds that are linear between corners the fourth powers' integral is exact, also where the sign changes.
    fourth = (start**4 + start**3 * end + start**2 * end**2 + start * end**3 + end**4) / 5 * lengths
    total = torch.nn.functional.pad(fourth.cumsum(-1), (1, 0))
    turn = _turn(start, end)
    before_turn = (start.abs() ** 5 / (start.abs() + end.abs()).clamp_min(_SLOWEST) / 5 * lengths).gather(2, turn)
    run = (total - total.gather(2, turn) - before_turn).abs()
    speed = speeds.abs().clamp_min(_SLOWEST)
    thickness = (_GROWTH * run / speed**4 * (kinematic_viscosity / (speed * stream_speed)) ** 0.25) ** 0.8

    panel = torch.arange(lengths.shape[-1])
    downstream = (panel > turn).double() - (panel < turn).double()  # the way the flow runs; none where it parts
    slope = downstream * (speed[..., 1:] - speed[..., :-1]) / lengths
    middle = (speed[..., 1:] + speed[..., :-1]) / 2
    load = -_GROWTH * (run[..., :-1] + run[..., 1:]) / 2 * slope / middle**5
    tail = _tail(speeds.shape[-1])
    to_recover = middle.square() - (speed[..., tail] * speed[..., -1 - tail]).unsqueeze(-1)
    worst = torch.maximum(load / _SEPARATION, to_recover / _RECOVERY)
    over = torch.sigmoid((worst - 1) / _SOFTNESS)

    is_inside = (panel >= tail) & (panel < len(panel) - tail)
    below, above = (is_inside & (downstream == way) for way in (-1, 1))
    attached = torch.minimum(
        _attached(over.flip(-1), lengths.flip(-1), below.flip(-1)), _attached(over, lengths, above)
    )
    at_ends = thickness[..., [tail, -1 - tail]] * speed[..., [tail, -1 - tail]] ** _WAKE
    return Layer(at_ends.sum(-1), attached)


def _turn(start: Tensor, end: Tensor) -> Tensor:
    """The first panel on which the flow parts: it holds the stagnation point. (designs, elements, 1)."""
    return ((start < 0) & (end >= 0)).to(torch.int8).argmax(-1, keepdim=True)


def _attached(over: Tensor, lengths: Tensor, is_side: Tensor) -> Tensor:
    """The share of a side's length before separation. What has come off does not come on again."""
    still_on = 1 - (over * is_side).cummax(-1).values
    length = lengths * is_side
    return (still_on * length).sum(-1) / length.sum(-1).clamp_min(_SLOWEST * _SLOWEST)


def _tail(num_points: int) -> int:
    """How many corners from the trailing edge its neighbourhood reaches."""
    turn = torch.acos(torch.tensor(1 - 2 * _TAIL, dtype=torch.float64)) * (num_points - 1) / (2 * torch.pi)
    return max(1, int(turn.ceil()))
