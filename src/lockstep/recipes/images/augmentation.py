"""Images that are a little different each time: shifted, and mirrored.

What is done to an image is drawn from Python's global stream, which the loader seeds for every sample.
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from lockstep.errors import UserError
from lockstep.recipes.images.collection import Images


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """From each image with a black border of `padding` pixels, a random window of its size; half of them mirrored."""

    def __init__(self, images: Images, padding: int, flip: bool) -> None:
        self._height, self._width = images.pixels.shape[2:]
        if padding >= min(self._height, self._width):
            raise UserError(
                f"data.padding={padding}: images of {self._height} × {self._width} pixels would be shifted out of "
                "sight: expected fewer than they have a side"
            )
        self._padded = F.pad(images.pixels, [padding] * 4)  # once for all: a sample is then only a view
        self._labels = images.labels
        self._places = 2 * padding + 1  # that a window can have, in each direction
        self._flip = flip

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        top, left = random.randrange(self._places), random.randrange(self._places)
        pixels = self._padded[index, :, top : top + self._height, left : left + self._width]
        if self._flip and random.random() < 0.5:
            pixels = torch.flip(pixels, [2])
        return pixels, self._labels[index]
