"""Metrics of a VAE: active units of the code, and precision and coverage of generated images.

Around every real image lies a ball that reaches its third nearest real neighbour. *Precision* is the share of generated
images that lie in such a ball: how many look real. *Coverage* is the share of balls with a generated image in them: how
much of the real data is generated (Kynkäänniemi et al., 2019; Naeem et al., 2020). Pixel distances tolerate blur: read
both together, and look at the pictures.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from lockstep.metrics.accumulators import RowAccumulator
from lockstep.metrics.averages import column_sums
from lockstep.recipes.vae.autoencoder import as_floats

_MIN_VARIANCE = 0.01  # of a latent's mean over all images; an uninformative latent has almost none


@dataclass(frozen=True, eq=False)
class ActiveUnits:
    """A metric: how many latents vary from image to image, over all images of all chunks."""

    means: Tensor  # (images, latent)

    def value(self, device: torch.device) -> Tensor:
        means = self.means.detach().to(device, torch.float64)
        count = torch.full((1,), float(len(means)), dtype=torch.float64, device=device)
        return torch.cat([count, means.sum(0), means.square().sum(0)])

    def accumulator(self) -> RowAccumulator:
        return RowAccumulator()

    def result(self, collected: Tensor) -> float:
        count, *sums = column_sums(collected)
        first, second = sums[: len(sums) // 2], sums[len(sums) // 2 :]
        variances = [square / count - (mean / count) ** 2 for mean, square in zip(first, second, strict=True)]
        return float(sum(variance > _MIN_VARIANCE for variance in variances))


_NUM_NEIGHBOURS = 3
_MAX_IMAGES = 2000  # per set: all distances between two sets are in memory at once


class Likeness(NamedTuple):
    """How similar a set of images is to the training images."""

    precision: float
    coverage: float


class Comparison(NamedTuple):
    """The likeness of generated images, and of two references."""

    drawn: Likeness
    real: Likeness  # of test images
    noise: Likeness  # of images in which each pixel is taken from a random training image


def compare_images(drawn: Tensor, train: Tensor, test: Tensor, generator: Generator) -> Comparison:
    """Compare generated, real and noise images (N, C, H, W) with training images, the same number of each."""
    count = min(len(drawn), len(test), len(train), _MAX_IMAGES)
    known = as_floats(train[:_MAX_IMAGES]).flatten(1)
    candidates = (drawn[:count].flatten(1), as_floats(test[:count]).flatten(1), _shuffled(known, generator)[:count])
    return Comparison(*(_likeness(each, known) for each in candidates))


def _likeness(images: Tensor, known: Tensor) -> Likeness:
    # An image is its own nearest neighbour, hence + 1.
    radii = torch.cdist(known, known).kthvalue(min(_NUM_NEIGHBOURS + 1, len(known)), dim=1).values
    is_inside = torch.cdist(images, known) <= radii
    return Likeness(is_inside.any(1).double().mean().item(), is_inside.any(0).double().mean().item())


def _shuffled(images: Tensor, generator: Generator) -> Tensor:
    """Shuffle every column independently."""
    order = torch.rand(images.shape, generator=generator).argsort(0).to(images.device)
    return images.gather(0, order)
