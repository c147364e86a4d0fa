"""What recipes are given: images as bytes, with a label each, already split."""

from typing import NamedTuple

from torch import Tensor


class Images(NamedTuple):
    pixels: Tensor  # uint8 of shape (images, channels, height, width)
    labels: Tensor  # int64, from 0


class ImageSplits(NamedTuple):
    train: Images
    test: Images
    classes: tuple[str, ...]  # the labels' names

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of each image."""
        channels, height, width = self.train.pixels.shape[1:]
        return channels, height, width
