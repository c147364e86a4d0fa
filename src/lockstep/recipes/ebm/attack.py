"""Projected gradient ascent (PGD) on images: adversarial attacks, and pictures of the results.

Only gradients with respect to the images are computed: the parameters' gradients are left alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.recipes.ebm.energy_network import log_density
from lockstep.recipes.images.image_grid import mosaic

ImageObjective = Callable[[Tensor], Tensor]
"""Maps images to one number per image, which must not depend on the other images."""

_MIN_NORM = 1e-12  # avoids division by zero


class GradientAscent(NamedTuple):
    """`steps` steps of length `rate`, within an L2 ball of `radius` around the start and within 0 … 1."""

    radius: float
    rate: float
    steps: int

    def maximize(self, objective: ImageObjective, start: Tensor, first: Tensor | None = None) -> Tensor:
        """Maximize the objective. `first`: the point to begin at, if not `start`; the ball is around `start`."""
        start = start.detach()
        point = start if first is None else self._within(start, first.detach())
        for _ in range(self.steps):
            point = self._within(start, point + self.rate * _unit(_gradient(objective, point)))
        return point

    def _within(self, start: Tensor, point: Tensor) -> Tensor:
        change = point - start
        shrink = (self.radius / _norm(change)).clamp(max=1)
        return (start + shrink * change).clamp(0, 1)  # clamping moves closer to the start, which is in the box


def mislead(model: nn.Module, images: Tensor, labels: Tensor, ascent: GradientAscent) -> Tensor:
    """Attack a classifier: return images near the given ones that it is least likely to classify correctly."""
    # Begin at a random point of the ball: at the image itself, the loss may be too flat.
    first = images + ascent.radius * torch.rand_like(images[:, :1, :1, :1]) * _unit(torch.randn_like(images))
    return ascent.maximize(lambda near: F.cross_entropy(model(near), labels, reduction="none"), images, first)


def disguise(model: nn.Module, images: Tensor, ascent: GradientAscent) -> Tensor:
    """Return images near the given ones with the highest density under the model: outsiders disguised as data."""
    return ascent.maximize(lambda near: log_density(model(near)), images)


def _gradient(objective: ImageObjective, point: Tensor) -> Tensor:
    with torch.enable_grad():  # evaluation disables gradients
        point = point.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(objective(point).sum(), point)
    return gradient


def _unit(directions: Tensor) -> Tensor:
    return directions / _norm(directions)


def _norm(images: Tensor) -> Tensor:
    """The norm of each image, keeping its dimensions."""
    norms: Tensor = torch.linalg.vector_norm(images, dim=(1, 2, 3), keepdim=True)
    return norms.clamp(min=_MIN_NORM)


_ROWS = 6  # images per class


def imagined(
    model: nn.Module, shape: tuple[int, int, int], num_classes: int, ascent: GradientAscent, draw: Generator
) -> Tensor:
    """Return a picture with a column per class: faint noise, optimized for the score of that class."""
    device = next(model.parameters()).device
    start = (0.5 + 0.1 * torch.randn(_ROWS * num_classes, *shape, generator=draw)).clamp(0, 1).to(device)
    classes = torch.arange(num_classes, device=device).repeat(_ROWS)

    def score_of_class(images: Tensor) -> Tensor:
        scores: Tensor = model(images)
        return scores.gather(1, classes[:, None])[:, 0]

    return mosaic(ascent.maximize(score_of_class, start), num_classes)


def before_and_after(model: nn.Module, outsiders: Tensor, ascent: GradientAscent) -> Tensor:
    """Return a picture with outsiders above, and each one's disguised version below."""
    outsiders = outsiders.to(next(model.parameters()).device)
    return mosaic(torch.cat([outsiders, disguise(model, outsiders, ascent)]), len(outsiders))
