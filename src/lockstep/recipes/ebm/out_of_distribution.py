"""Generators of out-of-distribution images, in families: some for training, others only for the test.

Image number i of a set is a pure function of (seed, i), so it is the same wherever and whenever it is generated.
"""

from collections.abc import Callable, Mapping
from math import pi

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils.data import Dataset

from lockstep.recipes.images.image_splits import Images
from lockstep.world.keyed_random import keyed_generator

Family = Callable[[Images, Generator], Tensor]
"""Draws an image of the same shape as the originals, with values from 0 to 1; some families transform an original."""


class GeneratedImages(Dataset[Tensor]):
    """`length` images, of each family in turn."""

    def __init__(self, families: Mapping[str, Family], originals: Images, length: int, seed: int) -> None:
        self._families = list(families.values())
        self._originals = originals
        self._length = length
        self._seed = seed

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Tensor:
        family = self._families[index % len(self._families)]
        return family(self._originals, keyed_generator(self._seed, "out of distribution", index))


def noise(originals: Images, draw: Generator) -> Tensor:
    """Independent pixels around a random brightness, with random contrast."""
    shape = _shape(originals)
    return (_between(0, 1, draw) + _between(0.05, 0.5, draw) * torch.randn(shape, generator=draw)).clamp(0, 1)


def smoothed_noise(originals: Images, draw: Generator) -> Tensor:
    """Clouds: coarse noise, interpolated smoothly, from black to white."""
    channels, height, width = _shape(originals)
    coarse = torch.rand(1, channels, *_integers(2, max(3, height // 3), 2, draw), generator=draw)
    clouds = F.interpolate(coarse, (height, width), mode="bilinear", align_corners=True)[0]
    low, high = clouds.min(), clouds.max()
    return (clouds - low) / (high - low).clamp(min=1e-3)


def gratings(originals: Images, draw: Generator) -> Tensor:
    """A sine wave of random direction and wavelength."""
    channels, height, width = _shape(originals)
    rows, columns = _grid(height, width)
    angle, waves = _between(0, pi, draw), _between(1, min(height, width) / 3, draw)
    along = rows * torch.sin(angle) + columns * torch.cos(angle)
    return _coloured(0.5 + 0.5 * torch.sin(2 * pi * (waves * along + _between(0, 1, draw))), channels, draw)


def patches(originals: Images, draw: Generator) -> Tensor:
    """A few overlapping rectangles of one colour each."""
    channels, height, width = _shape(originals)
    image = torch.rand(channels, 1, 1, generator=draw).expand(channels, height, width).clone()
    for _ in range(_integers(1, 5, 1, draw)[0]):
        tops, lefts = (torch.randint(size, (2,), generator=draw).sort().values for size in (height, width))
        colour = torch.rand(channels, 1, 1, generator=draw)
        image[:, tops[0] : tops[1] + 1, lefts[0] : lefts[1] + 1] = colour
    return image


def cut_ups(originals: Images, draw: Generator) -> Tensor:
    """An original cut into 2 × 2 or 4 × 4 shuffled tiles, or into pixels if its size is not divisible."""
    image = _pick(originals, draw)
    channels, height, width = image.shape
    per_side = 2 ** _integers(1, 2, 1, draw)[0]
    if height % per_side or width % per_side:
        return image.flatten(1)[:, torch.randperm(height * width, generator=draw)].view(image.shape)
    tall, wide = height // per_side, width // per_side
    tiles = image.view(channels, per_side, tall, per_side, wide).permute(1, 3, 0, 2, 4).flatten(0, 1)
    tiles = tiles[_nontrivial_permutation(len(tiles), draw)].view(per_side, per_side, channels, tall, wide)
    return tiles.permute(2, 0, 3, 1, 4).reshape(image.shape)


def checkerboards(originals: Images, draw: Generator) -> Tensor:
    """A checkerboard of random field size and offset."""
    channels, height, width = _shape(originals)
    field, shift = _integers(1, max(1, height // 4), 2, draw), _integers(0, 3, 2, draw)
    rows = (torch.arange(height) + shift[0]) // field[0]
    columns = (torch.arange(width) + shift[1]) // field[1]
    return _coloured(((rows[:, None] + columns) % 2).float(), channels, draw)


def ramps(originals: Images, draw: Generator) -> Tensor:
    """A linear or radial gradient between two colours."""
    channels, height, width = _shape(originals)
    rows, columns = _grid(height, width)
    if _between(0, 1, draw) < 0.5:
        angle = _between(0, 2 * pi, draw)
        ramp = rows * torch.sin(angle) + columns * torch.cos(angle)
    else:
        ramp = ((rows - _between(0, 1, draw)) ** 2 + (columns - _between(0, 1, draw)) ** 2).sqrt()
    return _coloured((ramp - ramp.min()) / (ramp.max() - ramp.min()), channels, draw)


def dots(originals: Images, draw: Generator) -> Tensor:
    """Single pixels of full brightness on black; with several channels, in random saturated colours."""
    shape = _shape(originals)
    is_dot = torch.rand(1, *shape[1:], generator=draw) < _between(0.05, 0.4, draw)
    bright = torch.rand(shape, generator=draw) < 0.5 if shape[0] > 1 else torch.ones(shape, dtype=torch.bool)
    return (is_dot & bright).float()


def scribbles(originals: Images, draw: Generator) -> Tensor:
    """Similar to handwriting: one or two strokes of a wandering pen. A few look like letters."""
    channels, height, width = _shape(originals)
    rows, columns = _grid(height, width)
    ink = torch.zeros(height, width)
    for _ in range(_integers(1, 2, 1, draw)[0]):
        turns = 0.6 * torch.randn(_STROKE, generator=draw)
        heading = _between(0, 2 * pi, draw) + turns.cumsum(0)
        pen = _between(0.25, 0.75, draw) + torch.stack([heading.sin(), heading.cos()]).cumsum(1) / _STROKE * 1.5
        pen = pen.clamp(0.05, 0.95)[:, :, None, None]
        distance = (rows - pen[0]) ** 2 + (columns - pen[1]) ** 2
        ink = torch.maximum(ink, torch.exp(-distance / (2 * 0.07**2)).amax(0))
    return ink.expand(channels, height, width).clone() if channels == 1 else _coloured(ink, channels, draw)


def blends(originals: Images, draw: Generator) -> Tensor:
    """Similar to the data: the mean of two originals of different classes."""
    one, other = (int(index) for index in _two_of_different_classes(originals.labels, draw))
    return (originals.pixels[one].float() + originals.pixels[other].float()) / (2 * 255)


TRAINED: dict[str, Family] = {
    "noise": noise,
    "smoothed_noise": smoothed_noise,
    "gratings": gratings,
    "patches": patches,
    "cut_ups": cut_ups,
}
UNSEEN: dict[str, Family] = {
    "checkerboards": checkerboards,
    "ramps": ramps,
    "dots": dots,
    "scribbles": scribbles,
    "blends": blends,
}

_STROKE = 24  # points per pen stroke


def _shape(originals: Images) -> tuple[int, int, int]:
    channels, height, width = originals.pixels.shape[1:]
    return channels, height, width


def _grid(height: int, width: int) -> tuple[Tensor, Tensor]:
    """The row and column of each pixel, from 0 to 1."""
    return (torch.arange(height) + 0.5)[:, None] / height, (torch.arange(width) + 0.5) / width


def _between(low: float, high: float, draw: Generator) -> Tensor:
    return low + (high - low) * torch.rand((), generator=draw)


def _integers(low: int, high: int, count: int, draw: Generator) -> list[int]:
    """Draw whole numbers from low to high, both included."""
    numbers: list[int] = torch.randint(low, high + 1, (count,), generator=draw).tolist()
    return numbers


def _coloured(pattern: Tensor, channels: int, draw: Generator) -> Tensor:
    """Map a pattern from 0 to 1 to two distinct colours."""
    one = torch.rand(channels, 1, 1, generator=draw)
    other = (one + _between(0.35, 0.65, draw)) % 1
    return one + pattern * (other - one)


def _pick(originals: Images, draw: Generator) -> Tensor:
    return originals.pixels[int(torch.randint(len(originals.pixels), (), generator=draw))].float() / 255


def _nontrivial_permutation(count: int, draw: Generator) -> Tensor:
    """A permutation other than the identity."""
    order = torch.randperm(count, generator=draw)
    return order if (order != torch.arange(count)).any() else order.roll(1)


def _two_of_different_classes(labels: Tensor, draw: Generator) -> tuple[Tensor, Tensor]:
    one = torch.randint(len(labels), (), generator=draw)
    others = (labels != labels[one]).nonzero()[:, 0]
    return one, others[torch.randint(len(others), (), generator=draw)]
