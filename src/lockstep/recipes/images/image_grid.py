"""Pictures of many images: a grid, and a classifier's guesses with green frames where right and red where wrong."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.images.image_splits import Images, ImageSplits
from lockstep.train.run import Run

_SIDE = 64  # pixels: about how large each image is shown
_GAP = 1.0  # white


def mosaic(images: Tensor, columns: int) -> Tensor:
    """Arrange images (N, C, H, W) with values from 0 to 1 in one image (C, H', W'), with white lines between them.

    Small images are enlarged by a whole factor. Empty places in the last row are white.
    """
    count, channels, height, width = images.shape
    columns = max(1, min(columns, count))
    rows = -(-count // columns)
    factor = max(1, round(_SIDE / max(height, width)))
    height, width = height * factor, width * factor
    enlarged = images.detach().float().clamp(0, 1).repeat_interleave(factor, 2).repeat_interleave(factor, 3)
    grid = torch.full((channels, rows * (height + 1) - 1, columns * (width + 1) - 1), _GAP, device=images.device)
    for number, image in enumerate(enlarged):
        top, left = number // columns * (height + 1), number % columns * (width + 1)
        grid[:, top : top + height, left : left + width] = image
    return grid


_GREEN, _RED = (0.1, 0.75, 0.2), (0.9, 0.1, 0.1)
_FRAME = 16  # pixels of an image per pixel of its frame


class Guesses(NamedTuple):
    """A classifier's guesses for some images."""

    picture: Tensor  # (3, height, width), from 0 to 1
    text: str  # the guesses as class names, a line per row of the picture


@torch.no_grad()
def draw_guesses(
    model: nn.Module, images: Images, classes: Sequence[str], device: torch.device, columns: int = 8
) -> Guesses:
    """Classify the images, which the model takes as bytes, and draw its guesses. The model's mode is restored."""
    was_training = model.training
    model.eval()
    try:
        guesses = model(images.pixels.to(device)).argmax(1).cpu()
    finally:
        model.train(was_training)
    is_right = guesses == images.labels
    words = [
        classes[guess] if right else f"{classes[guess]} (is {classes[label]})"
        for guess, label, right in zip(guesses.tolist(), images.labels.tolist(), is_right.tolist(), strict=True)
    ]
    rows = [", ".join(words[start : start + columns]) for start in range(0, len(words), columns)]
    return Guesses(mosaic(_framed(images.pixels, is_right), columns), "\n".join(rows))


def log_guesses(run: Run, model: nn.Module, images: ImageSplits, count: int) -> None:
    """Log the guesses for the first `count` test images. All ranks call this: each may hold only a shard."""
    if count:
        first = Images(*(tensor[:count] for tensor in images.test))
        guesses = draw_guesses(model, first, images.classes, run.world.device)
        run.log_image("guesses", guesses.picture)
        run.log_text("guesses", guesses.text)


def _framed(pixels: Tensor, is_right: Tensor) -> Tensor:
    count, channels, height, width = pixels.shape
    frame = -(-max(height, width) // _FRAME)
    coloured = (pixels.float() / 255).expand(count, 3, height, width) if channels == 1 else pixels.float() / 255
    framed = F.pad(coloured, [frame] * 4, value=-1.0)
    colours = torch.where(is_right[:, None], torch.tensor(_GREEN), torch.tensor(_RED))[:, :, None, None]
    return torch.where(framed < 0, colours, framed)
