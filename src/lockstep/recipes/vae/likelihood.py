"""How likely an image is, given a score for each of its values: two ways to say it, both in nats per image.

A score's sigmoid is the value that is expected there, from 0 to 1.
"""

from math import log, pi
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Kind = Literal["bernoulli", "gaussian"]

LEVELS = 256  # that a stored value may have

_FIRST_SPREAD = 0.25  # of a value around the expected one, on a scale from 0 to 1


class Bernoulli(nn.Module):
    """Ink or no ink, where a grey value is the chance of ink. It says nothing of how many bits a grey value takes."""

    def nats(self, scores: Tensor, images: Tensor) -> Tensor:
        """The cross-entropy of each image; its values are from 0 to 1."""
        return F.binary_cross_entropy_with_logits(scores.float(), images, reduction="none").flatten(1).sum(1)


class Gaussian(nn.Module):
    """A bell curve around each expected value, as wide as suits the channel: how wide is learned."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.log_spread = nn.Parameter(torch.full((channels, 1, 1), log(_FIRST_SPREAD)))

    def nats(self, scores: Tensor, images: Tensor) -> Tensor:
        """What each image costs, stored with 256 levels.

        A level is an interval. A value drawn evenly from it makes the curve's density a bound on the chance of the
        level; without that draw, the density of a few exact values could grow without end.
        """
        drawn = (images * (LEVELS - 1) + torch.rand_like(images)) / LEVELS
        distance = (drawn - scores.float().sigmoid()) / self.log_spread.exp()
        density = 0.5 * distance.square() + self.log_spread + 0.5 * log(2 * pi)
        return (density + log(LEVELS)).flatten(1).sum(1)


def make_likelihood(kind: Kind, channels: int) -> Bernoulli | Gaussian:
    return Bernoulli() if kind == "bernoulli" else Gaussian(channels)
