"""Are drawn images like real ones? A measure that needs no trained judge, beside what it says of real images and noise.

Around every real image lies a ball that reaches its third nearest real neighbour. *Precision* is the share of drawn
images that lie in such a ball: how many could be real. *Coverage* is the share of balls with a drawn image in them: how
much of what is real gets drawn. (Kynkäänniemi et al., 2019; Naeem et al., 2020; here on pixels.) On pixels, blur is
forgiven: read both together, and beside the picture.
"""

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lockstep.recipes.vae.autoencoder import as_floats

_NEIGHBOURS = 3  # that a ball reaches
_MOST = 2000  # images of a set: all distances between two sets are in memory at once


class Likeness(NamedTuple):
    precision: float
    coverage: float


class Comparison(NamedTuple):
    """With training images."""

    drawn: Likeness
    real: Likeness  # test images in place of the drawn
    noise: Likeness  # images of which every value is that of some training image at that place


def compare(drawn: Tensor, train: Tensor, test: Tensor, generator: Generator) -> Comparison:
    """Sets of images (N, C, H, W). As many drawn images are compared as there are of the test, or fewer."""
    count = min(len(drawn), len(test), len(train), _MOST)
    known = as_floats(train[:_MOST]).flatten(1)
    candidates = (drawn[:count].flatten(1), as_floats(test[:count]).flatten(1), _shuffled(known, generator)[:count])
    return Comparison(*(_likeness(each, known) for each in candidates))


def _likeness(images: Tensor, known: Tensor) -> Likeness:
    # An image is its own nearest neighbour, hence one more.
    radii = torch.cdist(known, known).kthvalue(min(_NEIGHBOURS + 1, len(known)), dim=1).values
    is_inside = torch.cdist(images, known) <= radii
    return Likeness(is_inside.any(1).double().mean().item(), is_inside.any(0).double().mean().item())


def _shuffled(images: Tensor, generator: Generator) -> Tensor:
    """Every column in an order of its own."""
    order = torch.rand(images.shape, generator=generator).argsort(0).to(images.device)
    return images.gather(0, order)
