"""What a classifier makes of some images: each in a frame, green where it is right and red where it is not."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.images.collection import Images
from lockstep.recipes.images.grid import mosaic

_GREEN, _RED = (0.1, 0.75, 0.2), (0.9, 0.1, 0.1)
_FRAME = 16  # one pixel of frame for so many of an image


class Guesses(NamedTuple):
    picture: Tensor  # (3, height, width), from 0 to 1
    text: str  # the same rows in words


@torch.no_grad()
def show_guesses(
    model: nn.Module, images: Images, classes: Sequence[str], device: torch.device, columns: int = 8
) -> Guesses:
    """`model` takes pixels as bytes. It is left as it was."""
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


def _framed(pixels: Tensor, is_right: Tensor) -> Tensor:
    count, channels, height, width = pixels.shape
    frame = -(-max(height, width) // _FRAME)
    coloured = (pixels.float() / 255).expand(count, 3, height, width) if channels == 1 else pixels.float() / 255
    framed = F.pad(coloured, [frame] * 4, value=-1.0)
    colours = torch.where(is_right[:, None], torch.tensor(_GREEN), torch.tensor(_RED))[:, :, None, None]
    return torch.where(framed < 0, colours, framed)
