"""What a trained model shows: test images beside what becomes of them, new images, and the way from one to another."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lockstep.recipes.images.grid import mosaic
from lockstep.recipes.vae.autoencoder import Autoencoder, as_floats

_COLUMNS = 10
_PAIRS = 3  # rows of originals, each with a row of reconstructions under it
_WALKS = 6


def reconstructions(model: Autoencoder, images: Tensor) -> Tensor:
    """Rows of images, each over what the model makes of their codes."""
    originals = as_floats(_first(images, _PAIRS * _COLUMNS))
    decoded = model.decode(model.encode(originals).mean)
    rows = (_PAIRS, _COLUMNS, *model.shape)
    return _framed(torch.stack([originals.view(rows), decoded.view(rows)], dim=1).flatten(0, 2))


def samples(model: Autoencoder, generator: Generator) -> Tensor:
    """New images."""
    return _framed(model.draw(_COLUMNS**2, generator))


def walks(model: Autoencoder, images: Tensor) -> Tensor:
    """Row by row from one image to another, in even steps between their codes."""
    codes = model.encode(_first(images, 2 * _WALKS)).mean
    begin, end = codes[:_WALKS, None], codes[_WALKS:, None]
    shares = torch.linspace(0, 1, _COLUMNS, device=begin.device)[:, None]
    return _framed(model.decode((begin + (end - begin) * shares).flatten(0, 1)))


def _first(images: Tensor, count: int) -> Tensor:
    """So many; where there are fewer, from the first again."""
    return images[torch.arange(count, device=images.device) % len(images)]


def _framed(images: Tensor) -> Tensor:
    """In rows, each with a dark frame: digits that fill their image would run into each other."""
    return mosaic(F.pad(images, (1, 1, 1, 1)), _COLUMNS)
