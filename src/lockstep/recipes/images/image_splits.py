"""Labelled images in memory, split into training and test sets, and augmented by shifts and flips."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import UserError


class Images(NamedTuple):
    """Images as bytes, each with a label."""

    pixels: Tensor  # uint8 of shape (images, channels, height, width)
    labels: Tensor  # int64, from 0


class ImageSplits(NamedTuple):
    """A training and a test set."""

    train: Images
    test: Images
    classes: tuple[str, ...]  # the labels' names

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of each image."""
        channels, height, width = self.train.pixels.shape[1:]
        return channels, height, width


def format_shape(shape: Sequence[int]) -> str:
    """Return a shape for messages, such as `3 × 32 × 32`."""
    return " × ".join(map(str, shape))


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Images shifted by up to `padding` pixels and, with `flip`, half of them mirrored, anew at every access.

    The draws come from Python's global random stream, which the loader seeds for every sample.
    """

    def __init__(self, images: Images, padding: int, flip: bool) -> None:
        self._height, self._width = images.pixels.shape[2:]
        if padding >= min(self._height, self._width):
            raise UserError(
                f"data.padding={padding}: images of {self._height} × {self._width} pixels would be shifted out of "
                "view: expected less than the shorter side"
            )
        self._padded = F.pad(images.pixels, [padding] * 4)  # once, so that a sample is only a view
        self._labels = images.labels
        self._num_offsets = 2 * padding + 1  # of a window, in each direction
        self._flip = flip

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        top, left = random.randrange(self._num_offsets), random.randrange(self._num_offsets)
        pixels = self._padded[index, :, top : top + self._height, left : left + self._width]
        if self._flip and random.random() < 0.5:
            pixels = torch.flip(pixels, [2])
        return pixels, self._labels[index]
