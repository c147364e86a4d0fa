"""The model: images into a few numbers each, with how sure it is of them, and such numbers back into images."""

from itertools import pairwise
from math import gcd, prod
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.recipes.vae.likelihood import Kind, make_likelihood

_SMALLEST_SIDE = 4  # of a picture inside the network: below it, one linear layer does the rest
_MOST_WIDTHS = 4  # channels grow to so many times the first layer's
_MOST_GROUPS = 8  # of channels that are normalised together
_SUREST = -12.0  # the smallest logarithm of a variance: beyond it fp32 sees none
_LEAST_SURE = 6.0
_DECODED_AT_ONCE = 250  # images: what the layers make of them takes up to a hundred times their memory


class Shape(NamedTuple):
    """Of every image."""

    channels: int
    height: int
    width: int


class Posterior(NamedTuple):
    """Where an image's code may lie: a normal distribution for each of its numbers."""

    mean: Tensor  # (images, latent)
    log_variance: Tensor

    @classmethod
    def read(cls, encoded: Tensor) -> Self:
        mean, log_variance = encoded.float().chunk(2, dim=1)
        return cls(mean, log_variance.clamp(_SUREST, _LEAST_SURE))

    def draw(self) -> Tensor:
        """A code for each image, from the global stream: in a lane and in an evaluation, that is keyed."""
        return self.mean + (0.5 * self.log_variance).exp() * torch.randn_like(self.mean)

    def kl(self) -> Tensor:
        """What knowing this instead of nothing (mean 0, variance 1) is worth, in nats, per image and number."""
        return 0.5 * (self.mean.square() + self.log_variance.exp() - 1 - self.log_variance)


class Autoencoder(nn.Module):
    """Called with images, it returns its own loss and what that is made of.

    `images`: (N, C, H, W), bytes, or floats from 0 to 1. What else a batch has, such as labels, is not looked at.
    """

    def __init__(self, shape: Shape, latent: int, width: int, likelihood: Kind, beta: float) -> None:
        super().__init__()
        self.shape = shape
        self.latent = latent
        self.beta = beta
        sides = _sides(shape.height, shape.width)
        widths = [width * min(2**level, _MOST_WIDTHS) for level in range(len(sides))]
        self.encoder = _encoder(shape.channels, widths, sides[-1], 2 * latent)
        self.decoder = _decoder(latent, widths, sides, shape.channels)
        self.likelihood = make_likelihood(likelihood, shape.channels)

    def forward(self, images: Tensor, *_labels: Tensor, only: Literal["encoder", "decoder"] | None = None) -> Any:
        """`loss`: the mean, with beta. `reconstruction`: nats of each image. `kl`: of each image and number. `mean`.

        With `only`, what that half makes of what it is given.
        """
        if only is not None:
            return self.encoder(as_floats(images)) if only == "encoder" else self.decoder(images)
        images = as_floats(images)
        posterior = Posterior.read(self.encoder(images))
        reconstruction = self.likelihood.nats(self.decoder(posterior.draw()), images)
        kl = posterior.kl()
        loss = (reconstruction + self.beta * kl.sum(1)).mean()
        # The mean as a copy: FSDP warns of a module that returns a part of some other tensor.
        return {"loss": loss, "reconstruction": reconstruction, "kl": kl, "mean": posterior.mean.clone()}

    # Both call the model as a whole: where its weights are spread over ranks, that is what brings them together.

    def encode(self, images: Tensor) -> Posterior:
        return Posterior.read(self(images, only="encoder"))

    def decode(self, codes: Tensor) -> Tensor:
        """The images, as values from 0 to 1, that these codes (N, latent) stand for."""
        scores: Tensor = self(codes, only="decoder")
        return scores.float().sigmoid()

    def draw(self, count: int, generator: Generator) -> Tensor:
        """New images: those of codes drawn as if nothing were known, on the CPU, so that every device has the same."""
        codes = torch.randn(count, self.latent, generator=generator).to(next(self.parameters()).device)
        parts = [self.decode(codes[start : start + _DECODED_AT_ONCE]) for start in range(0, count, _DECODED_AT_ONCE)]
        return torch.cat(parts)


class Residual(nn.Module):
    """Adds to what it is given: two convolutions with norms over groups of channels, never over images."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _norm(channels), nn.SiLU(), _conv(channels, channels), _norm(channels), nn.SiLU(), _conv(channels, channels)
        )

    def forward(self, pictures: Tensor) -> Tensor:
        added: Tensor = self.layers(pictures)
        return pictures + added


class Enlarge(nn.Module):
    """To a given size: each pixel is repeated, then a convolution smooths what that leaves."""

    def __init__(self, inputs: int, outputs: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size
        self.smooth = _conv(inputs, outputs)

    def forward(self, pictures: Tensor) -> Tensor:
        smoothed: Tensor = self.smooth(F.interpolate(pictures, size=self.size))
        return smoothed


def as_floats(images: Tensor) -> Tensor:
    """From 0 to 1."""
    return images if images.is_floating_point() else images.float() / 255


def _sides(height: int, width: int) -> list[tuple[int, int]]:
    """The sizes of the pictures inside, from the image's own down by halves."""
    sides = [(height, width)]
    while min(sides[-1]) >= 2 * _SMALLEST_SIDE:
        height, width = (height + 1) // 2, (width + 1) // 2
        sides.append((height, width))
    return sides


def _encoder(channels: int, widths: list[int], last: tuple[int, int], outputs: int) -> nn.Module:
    layers: list[nn.Module] = [_conv(channels, widths[0])]
    for width, wider in pairwise(widths):
        layers += [Residual(width), nn.Conv2d(width, wider, 3, stride=2, padding=1)]
    layers += [Residual(widths[-1]), _norm(widths[-1]), nn.SiLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(widths[-1] * prod(last), outputs))


def _decoder(latent: int, widths: list[int], sides: list[tuple[int, int]], channels: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Linear(latent, widths[-1] * prod(sides[-1])),
        nn.Unflatten(1, (widths[-1], *sides[-1])),
        Residual(widths[-1]),
    ]
    for level in reversed(range(len(widths) - 1)):
        layers += [Enlarge(widths[level + 1], widths[level], sides[level]), Residual(widths[level])]
    return nn.Sequential(*layers, _norm(widths[0]), nn.SiLU(), _conv(widths[0], channels))


def _conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(gcd(_MOST_GROUPS, channels), channels)
