"""MNIST's IDX layout: two zero bytes, the kind of number, how many dimensions, each one's size, then the numbers."""

import struct
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.images.collection import Images, ImageSplits
from lockstep.recipes.images.reading import MOST_BYTES, opened

_BYTES = 8  # IDX's name for the kind of number that we read
_IMAGES, _LABELS = 3, 1  # dimensions


class _Files(NamedTuple):
    images: Path
    labels: Path


def has_idx(folder: Path) -> bool:
    """Does this folder look like it?"""
    return any(folder.glob("*-idx[13]-ubyte")) or any(folder.glob("*-idx[13]-ubyte.gz"))


def load_idx(folder: Path) -> ImageSplits:
    """`train-images-idx3-ubyte` and so on, plain or with `.gz`; the test set's names begin with `t10k`."""
    files, test_files = _files(folder, "train"), _files(folder, "t10k")
    train, test = _read(files), _read(test_files)
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        raise UserError(
            f"{test_files.images}: images of {_size(test.pixels)} pixels, "
            f"but those to train on have {_size(train.pixels)}"
        )
    num_classes = _num_classes(files.labels, train.labels)
    _require_known(test_files.labels, test.labels, num_classes)
    return ImageSplits(train, test, tuple(map(str, range(num_classes))))


def _files(folder: Path, split: str) -> _Files:
    return _Files(*(_present(folder / f"{split}-{what}-ubyte") for what in ("images-idx3", "labels-idx1")))


def _present(file: Path) -> Path:
    packed = file.with_name(f"{file.name}.gz")
    return packed if packed.exists() and not file.exists() else file


def _read(files: _Files) -> Images:
    pixels, labels = _numbers(files.images, _IMAGES), _numbers(files.labels, _LABELS)
    if len(pixels) != len(labels):
        raise UserError(f"{files.labels}: {len(labels):,} labels for the {len(pixels):,} images of {files.images.name}")
    return Images(pixels.unsqueeze(1), labels.long())


def _numbers(file: Path, dims: int) -> Tensor:
    with opened(file) as stream:
        header = stream.read(4 + 4 * dims)
        sizes = _sizes(file, header, dims)
        # Compressed data may unpack to any length: what is announced is read, and one byte, to see if more comes.
        data = stream.read(prod(sizes) + 1)
    if len(data) > prod(sizes):
        raise UserError(f"{file}: more data than its header announces ({' × '.join(map(str, sizes))} bytes)")
    if len(data) < prod(sizes):
        record = len(data) // prod(sizes[1:])
        raise UserError(f"{file}: ends in record {record:,} (from 0) of {sizes[0]:,}: the file is cut short")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(sizes)


def _sizes(file: Path, header: bytes, dims: int) -> tuple[int, ...]:
    if not header:
        raise UserError(f"{file}: empty")
    expected = bytes([0, 0, _BYTES, dims])
    if header[:4] != expected:
        raise UserError(f"{file}: begins with {header[:4].hex(' ')}: expected {expected.hex(' ')}, IDX of bytes")
    if len(header) < 4 + 4 * dims:
        raise UserError(f"{file}: its header is cut short")
    sizes = struct.unpack(f">{dims}I", header[4:])
    shown = " × ".join(f"{size:,}" for size in sizes)
    if 0 in sizes:
        raise UserError(f"{file}: its header announces {shown} bytes: there is nothing to read")
    if prod(sizes) > MOST_BYTES:
        raise UserError(
            f"{file}: its header announces {shown} bytes: more than the {MOST_BYTES:,} that are allowed for"
        )
    return sizes


def _num_classes(file: Path, labels: Tensor) -> int:
    """Labels are 0, 1, 2 … without a gap: so a damaged one is seen, whatever the number of classes is."""
    counts = torch.bincount(labels)
    (missing,) = torch.nonzero(counts == 0, as_tuple=True)
    if len(missing):
        record = int((labels > missing[0]).nonzero()[0])
        raise UserError(
            f"{file}: record {record:,} (from 0) has the label {labels[record]}, but no image to train on has "
            f"{missing[0]}: expected labels without a gap, from 0"
        )
    return len(counts)


def _require_known(file: Path, labels: Tensor, num_classes: int) -> None:
    (wrong,) = torch.nonzero(labels >= num_classes, as_tuple=True)
    if len(wrong):
        record = int(wrong[0])
        raise UserError(
            f"{file}: record {record:,} (from 0) has the label {labels[record]}: expected 0 to {num_classes - 1}, "
            "as in the images to train on"
        )


def _size(pixels: Tensor) -> str:
    return " × ".join(map(str, pixels.shape[2:]))
