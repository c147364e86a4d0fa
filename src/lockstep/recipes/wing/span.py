"""From a plane section to a wing of finite span: what the trailing vortices take away.

Lifting-line theory with one station: the trailing vortices send an even wash through the wing, against its force, of
2Γ / (π b) for a circulation Γ and a span b. Endplates act as a larger span, by Hoerner's rule (1 + 1.9 × height /
span); the vortices' images in the ground take back part of the wash, by McCormick's factor. The section feels the wash
as a stream at an angle, for which the panels know the answer: so pressures, too, are those of the wing.

Left out: how the load falls off towards the tips, the vortices below the endplates, the wheels and the car.
"""

import math
from typing import NamedTuple

from torch import Tensor

from lockstep.recipes.wing.panels import Flow, circulation

_ENDPLATE = 1.9  # Hoerner, for plates at both tips
_GROUND = 16.0  # McCormick, of the height over the span


class SpanFlow(NamedTuple):
    speeds: Tensor  # (designs, elements, points), with the wash
    wash: Tensor  # (designs,), upwards, as a share of the free stream


def with_wash(points: Tensor, flow: Flow, span: Tensor, plate_height: Tensor, plate_length: Tensor) -> SpanFlow:
    length = points[..., 0].amax((1, 2)) - points[..., 0].amin((1, 2))
    cover = (plate_length / length).clamp(max=1.0)  # a plate shorter than the wing does that much less
    far_span = span + _ENDPLATE * plate_height * cover
    height = points[..., 1].mean((1, 2))
    near = (_GROUND * height / span).square()
    per_circulation = 2 * near / (1 + near) / (math.pi * far_span)
    level, upward = circulation(points, flow.level), circulation(points, flow.upward)
    wash = -per_circulation * level / (1 + per_circulation * upward)
    return SpanFlow(flow.level + wash[:, None, None] * flow.upward, wash)
