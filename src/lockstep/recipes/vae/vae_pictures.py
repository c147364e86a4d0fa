"""Pictures of a trained VAE: reconstructions, new samples, and interpolations between images."""

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from lockstep.recipes.images.image_grid import mosaic
from lockstep.recipes.vae.autoencoder import Autoencoder, as_floats

_COLUMNS = 10
_PAIRS = 3  # pairs of rows: originals, and their reconstructions below
_WALKS = 6  # rows


def reconstructions(model: Autoencoder, images: Tensor) -> Tensor:
    """Return rows of images, each image above its reconstruction."""
    originals = as_floats(_first(images, _PAIRS * _COLUMNS))
    decoded = model.decode(model.encode(originals).mean)
    rows = (_PAIRS, _COLUMNS, *model.shape)
    return _framed(torch.stack([originals.view(rows), decoded.view(rows)], dim=1).flatten(0, 2))


def samples(model: Autoencoder, generator: Generator) -> Tensor:
    """Return a grid of generated images."""
    return _framed(model.draw(_COLUMNS**2, generator))


def walks(model: Autoencoder, images: Tensor) -> Tensor:
    """Return rows that interpolate between two images, in equal steps between their codes."""
    codes = model.encode(_first(images, 2 * _WALKS)).mean
    begin, end = codes[:_WALKS, None], codes[_WALKS:, None]
    shares = torch.linspace(0, 1, _COLUMNS, device=begin.device)[:, None]
    return _framed(model.decode((begin + (end - begin) * shares).flatten(0, 1)))


def _first(images: Tensor, count: int) -> Tensor:
    """The first `count` images, repeated if there are fewer."""
    return images[torch.arange(count, device=images.device) % len(images)]


def _framed(images: Tensor) -> Tensor:
    """Arrange images in rows with dark frames, which separate digits that fill their images."""
    return mosaic(F.pad(images, (1, 1, 1, 1)), _COLUMNS)
