"""Projected gradient ascent on images: small changes that do the most harm, or the most good.

Only gradients with respect to the images are asked for, so parameters keep the gradients that they had.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.ebm.network import log_density

Height = Callable[[Tensor], Tensor]
"""From images to one number for each, which must not depend on the other images."""

_LEAST_NORM = 1e-12  # of what is divided by it


class Climb(NamedTuple):
    """So many steps of length `rate` up a height, never further than `radius` from the start (L2), nor out of 0 … 1."""

    radius: float
    rate: float
    steps: int

    def up(self, height: Height, start: Tensor, first: Tensor | None = None) -> Tensor:
        """Where it leads; the first point is the start itself, or one near it."""
        start = start.detach()
        point = start if first is None else self._within(start, first.detach())
        for _ in range(self.steps):
            point = self._within(start, point + self.rate * _unit(_slope(height, point)))
        return point

    def _within(self, start: Tensor, point: Tensor) -> Tensor:
        change = point - start
        shrink = (self.radius / _norm(change)).clamp(max=1)
        return (start + shrink * change).clamp(0, 1)  # the start is in the box, so this leads nearer to it


def mislead(model: nn.Module, images: Tensor, labels: Tensor, climb: Climb) -> Tensor:
    """Images near the given ones that the model is least likely to classify rightly."""
    # From a point of the ball that is drawn: at the image itself the loss may be too flat to show a way.
    first = images + climb.radius * torch.rand_like(images[:, :1, :1, :1]) * _unit(torch.randn_like(images))
    return climb.up(lambda near: F.cross_entropy(model(near), labels, reduction="none"), images, first)


def disguise(model: nn.Module, images: Tensor, climb: Climb) -> Tensor:
    """Images near the given ones that the model takes for its own data as much as possible."""
    return climb.up(lambda near: log_density(model(near)), images)


def _slope(height: Height, point: Tensor) -> Tensor:
    with torch.enable_grad():  # evaluation is without
        point = point.detach().requires_grad_()
        (slope,) = torch.autograd.grad(height(point).sum(), point)
    return slope


def _unit(directions: Tensor) -> Tensor:
    return directions / _norm(directions)


def _norm(images: Tensor) -> Tensor:
    """Of each image, with dimensions to divide by."""
    norms: Tensor = torch.linalg.vector_norm(images, dim=(1, 2, 3), keepdim=True)
    return norms.clamp(min=_LEAST_NORM)
