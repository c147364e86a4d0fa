"""The convolutional variational autoencoder, with a Bernoulli or a Gaussian likelihood."""

from itertools import pairwise
from math import gcd, log, pi, prod
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from lockstep.recipes.vae import LikelihoodKind

LEVELS = 256  # of a stored pixel value

_INITIAL_STD = 0.25  # of the values around their expected value, on a scale from 0 to 1


class Bernoulli(nn.Module):
    """Each value is the probability that a pixel is ink. This is not a density of grey values."""

    def nats(self, scores: Tensor, images: Tensor) -> Tensor:
        """Return the cross-entropy of each image, whose values are from 0 to 1, given a logit per value."""
        return F.binary_cross_entropy_with_logits(scores.float(), images, reduction="none").flatten(1).sum(1)


class Gaussian(nn.Module):
    """A normal distribution around each expected value, with a learned standard deviation per channel."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.log_spread = nn.Parameter(torch.full((channels, 1, 1), log(_INITIAL_STD)))

    def nats(self, scores: Tensor, images: Tensor) -> Tensor:
        """Return the negative log-likelihood of each image with 256 levels, given a logit per expected value.

        Each value is dequantized: drawn uniformly from its level's interval. Without that, the density at a few exact
        values could grow without bound.
        """
        drawn = (images * (LEVELS - 1) + torch.rand_like(images)) / LEVELS
        distance = (drawn - scores.float().sigmoid()) / self.log_spread.exp()
        density = 0.5 * distance.square() + self.log_spread + 0.5 * log(2 * pi)
        return (density + log(LEVELS)).flatten(1).sum(1)


def make_likelihood(kind: LikelihoodKind, channels: int) -> Bernoulli | Gaussian:
    return Bernoulli() if kind == "bernoulli" else Gaussian(channels)


_MIN_SIDE = 4  # of a feature map; one linear layer takes over from there
_MAX_WIDTH_FACTOR = 4  # the maximum number of channels, relative to the first layer
_MAX_GROUPS = 8  # of group norm
_MIN_LOG_VARIANCE = -12.0  # a smaller variance vanishes in fp32
_MAX_LOG_VARIANCE = 6.0
_DECODE_BATCH = 250  # images at a time: activations take up to a hundred times their memory


class ImageShape(NamedTuple):
    """The shape of every image."""

    channels: int
    height: int
    width: int


class Posterior(NamedTuple):
    """The distribution of an image's code: an independent normal for each of its numbers."""

    mean: Tensor  # (images, latent)
    log_variance: Tensor

    @classmethod
    def read(cls, encoded: Tensor) -> Self:
        """Split the encoder's output into means and log-variances."""
        mean, log_variance = encoded.float().chunk(2, dim=1)
        return cls(mean, log_variance.clamp(_MIN_LOG_VARIANCE, _MAX_LOG_VARIANCE))

    def draw(self) -> Tensor:
        """Sample a code per image from the global random stream, which is keyed in lanes and evaluations."""
        return self.mean + (0.5 * self.log_variance).exp() * torch.randn_like(self.mean)

    def kl(self) -> Tensor:
        """Return the KL divergence from the standard normal prior in nats, per image and number."""
        return 0.5 * (self.mean.square() + self.log_variance.exp() - 1 - self.log_variance)


class Autoencoder(nn.Module):
    """A VAE which, called with images, returns its loss and the terms of the loss.

    `images`: (N, C, H, W), bytes, or floats from 0 to 1. Other elements of a batch, such as labels, are ignored.
    """

    def __init__(self, shape: ImageShape, latent: int, width: int, likelihood: LikelihoodKind, beta: float) -> None:
        super().__init__()
        self.shape = shape
        self.latent = latent
        self.beta = beta
        sides = _sides(shape.height, shape.width)
        widths = [width * min(2**level, _MAX_WIDTH_FACTOR) for level in range(len(sides))]
        self.encoder = _encoder(shape.channels, widths, sides[-1], 2 * latent)
        self.decoder = _decoder(latent, widths, sides, shape.channels)
        self.likelihood = make_likelihood(likelihood, shape.channels)

    def forward(self, images: Tensor, *_labels: Tensor, only: Literal["encoder", "decoder"] | None = None) -> Any:
        """Return `loss` (mean, with beta), `reconstruction` (nats per image), `kl` (per image and number) and `mean`.

        With `only`, apply that half of the model alone, and return its output.
        """
        if only is not None:
            return self.encoder(as_floats(images)) if only == "encoder" else self.decoder(images)
        images = as_floats(images)
        posterior = Posterior.read(self.encoder(images))
        reconstruction = self.likelihood.nats(self.decoder(posterior.draw()), images)
        kl = posterior.kl()
        loss = (reconstruction + self.beta * kl.sum(1)).mean()
        # A copy of the mean: FSDP warns about modules that return views.
        return {"loss": loss, "reconstruction": reconstruction, "kl": kl, "mean": posterior.mean.clone()}

    # Both go through `forward`, because calling the module is what gathers sharded weights.

    def encode(self, images: Tensor) -> Posterior:
        """Return the distributions of the images' codes."""
        return Posterior.read(self(images, only="encoder"))

    def decode(self, codes: Tensor) -> Tensor:
        """Return the images, with values from 0 to 1, of codes (N, latent)."""
        scores: Tensor = self(codes, only="decoder")
        return scores.float().sigmoid()

    def draw(self, count: int, generator: Generator) -> Tensor:
        """Generate images from codes of the prior, drawn on the CPU so that they are the same on every device."""
        codes = torch.randn(count, self.latent, generator=generator).to(next(self.parameters()).device)
        parts = [self.decode(codes[start : start + _DECODE_BATCH]) for start in range(0, count, _DECODE_BATCH)]
        return torch.cat(parts)


class ResidualLayer(nn.Module):
    """Two convolutions with group norms, and a residual connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            _norm(channels), nn.SiLU(), _conv(channels, channels), _norm(channels), nn.SiLU(), _conv(channels, channels)
        )

    def forward(self, features: Tensor) -> Tensor:
        added: Tensor = self.layers(features)
        return features + added


class Upsample(nn.Module):
    """Nearest-neighbour upsampling to a given size, then a convolution."""

    def __init__(self, inputs: int, outputs: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size
        self.smooth = _conv(inputs, outputs)

    def forward(self, features: Tensor) -> Tensor:
        smoothed: Tensor = self.smooth(F.interpolate(features, size=self.size))
        return smoothed


def as_floats(images: Tensor) -> Tensor:
    """Convert bytes to floats from 0 to 1; floats are returned unchanged."""
    return images if images.is_floating_point() else images.float() / 255


def _sides(height: int, width: int) -> list[tuple[int, int]]:
    """The sizes of the feature maps, from the image's own down by halves."""
    sides = [(height, width)]
    while min(sides[-1]) >= 2 * _MIN_SIDE:
        height, width = (height + 1) // 2, (width + 1) // 2
        sides.append((height, width))
    return sides


def _encoder(channels: int, widths: list[int], last: tuple[int, int], outputs: int) -> nn.Module:
    layers: list[nn.Module] = [_conv(channels, widths[0])]
    for width, wider in pairwise(widths):
        layers += [ResidualLayer(width), nn.Conv2d(width, wider, 3, stride=2, padding=1)]
    layers += [ResidualLayer(widths[-1]), _norm(widths[-1]), nn.SiLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(widths[-1] * prod(last), outputs))


def _decoder(latent: int, widths: list[int], sides: list[tuple[int, int]], channels: int) -> nn.Module:
    layers: list[nn.Module] = [
        nn.Linear(latent, widths[-1] * prod(sides[-1])),
        nn.Unflatten(1, (widths[-1], *sides[-1])),
        ResidualLayer(widths[-1]),
    ]
    for level in reversed(range(len(widths) - 1)):
        layers += [Upsample(widths[level + 1], widths[level], sides[level]), ResidualLayer(widths[level])]
    return nn.Sequential(*layers, _norm(widths[0]), nn.SiLU(), _conv(widths[0], channels))


def _conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(gcd(_MAX_GROUPS, channels), channels)
