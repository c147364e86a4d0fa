"""Read images in MNIST's IDX format and in CIFAR's binary format, with bounds on what is read.

IDX files have two zero bytes, the type of number, the number of dimensions, the size of each, then the numbers. CIFAR
files have records of one or two label bytes and 3 × 32 × 32 pixels: red, then green, then blue.
"""

import gzip
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.images.image_splits import Images, ImageSplits, format_shape

MAX_IMAGE_SET_BYTES = 2**30  # of a training or test set: every process holds both in memory

_UNSIGNED_BYTES = 8  # IDX's code for this type of number
_IMAGE_DIMS, _LABEL_DIMS = 3, 1

_CIFAR_SHAPE = (3, 32, 32)
_CIFAR_PIXELS = prod(_CIFAR_SHAPE)
_MAX_NAMES_BYTES = 2**16


class _IdxFiles(NamedTuple):
    images: Path
    labels: Path


def has_idx(folder: Path) -> bool:
    """Whether the folder has files with MNIST's names."""
    return any(folder.glob("*-idx[13]-ubyte")) or any(folder.glob("*-idx[13]-ubyte.gz"))


def load_idx(folder: Path) -> ImageSplits:
    """Load `train-images-idx3-ubyte` and so on, plain or with `.gz`; the names of the test set begin with `t10k`."""
    files, test_files = _idx_files(folder, "train"), _idx_files(folder, "t10k")
    train, test = _read_idx(files), _read_idx(test_files)
    if train.pixels.shape[1:] != test.pixels.shape[1:]:
        raise UserError(
            f"{test_files.images}: images of {format_shape(test.pixels.shape[2:])} pixels, "
            f"but the training images have {format_shape(train.pixels.shape[2:])}"
        )
    num_classes = _num_classes(files.labels, train.labels)
    _require_known_labels(test_files.labels, test.labels, num_classes)
    return ImageSplits(train, test, tuple(map(str, range(num_classes))))


def _idx_files(folder: Path, split: str) -> _IdxFiles:
    return _IdxFiles(*(_plain_or_gzipped(folder / f"{split}-{what}-ubyte") for what in ("images-idx3", "labels-idx1")))


def _plain_or_gzipped(file: Path) -> Path:
    gzipped = file.with_name(f"{file.name}.gz")
    return gzipped if gzipped.exists() and not file.exists() else file


def _read_idx(files: _IdxFiles) -> Images:
    pixels, labels = _read_array(files.images, _IMAGE_DIMS), _read_array(files.labels, _LABEL_DIMS)
    if len(pixels) != len(labels):
        raise UserError(f"{files.labels}: {len(labels):,} labels for the {len(pixels):,} images of {files.images.name}")
    return Images(pixels.unsqueeze(1), labels.long())


def _read_array(file: Path, dims: int) -> Tensor:
    with open_bounded(file) as stream:
        header = stream.read(4 + 4 * dims)
        sizes = _parse_header(file, header, dims)
        # Compressed data may unpack to any length: read what is announced, and one byte to see whether there is more.
        data = stream.read(prod(sizes) + 1)
    if len(data) > prod(sizes):
        raise UserError(f"{file}: more data than its header announces ({format_shape(sizes)} bytes)")
    if len(data) < prod(sizes):
        record = len(data) // prod(sizes[1:])
        raise UserError(f"{file}: ends in record {record:,} (from 0) of {sizes[0]:,}: the file is truncated")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(sizes)


def _parse_header(file: Path, header: bytes, dims: int) -> tuple[int, ...]:
    """Check the header of an IDX file, and return the size of each dimension."""
    if not header:
        raise UserError(f"{file}: empty")
    expected = bytes([0, 0, _UNSIGNED_BYTES, dims])
    if header[:4] != expected:
        raise UserError(f"{file}: begins with {header[:4].hex(' ')}: expected {expected.hex(' ')}, an IDX header")
    if len(header) < 4 + 4 * dims:
        raise UserError(f"{file}: its header is truncated")
    sizes = struct.unpack(f">{dims}I", header[4:])
    shown = " × ".join(f"{size:,}" for size in sizes)
    if 0 in sizes:
        raise UserError(f"{file}: its header announces {shown} bytes: there is nothing to read")
    if prod(sizes) > MAX_IMAGE_SET_BYTES:
        raise UserError(f"{file}: its header announces {shown} bytes: more than the {MAX_IMAGE_SET_BYTES:,} allowed")
    return sizes


def _num_classes(file: Path, labels: Tensor) -> int:
    """Count the classes. Labels must be 0, 1, 2 … without a gap, so that a damaged label is noticed."""
    counts = torch.bincount(labels)
    (missing,) = torch.nonzero(counts == 0, as_tuple=True)
    if len(missing):
        record = int((labels > missing[0]).nonzero()[0])
        raise UserError(
            f"{file}: record {record:,} (from 0) has the label {labels[record]}, but no training image has "
            f"{missing[0]}: expected labels without a gap, from 0"
        )
    return len(counts)


def _require_known_labels(file: Path, labels: Tensor, num_classes: int) -> None:
    (wrong,) = torch.nonzero(labels >= num_classes, as_tuple=True)
    if len(wrong):
        record = int(wrong[0])
        raise UserError(
            f"{file}: record {record:,} (from 0) has the label {labels[record]}: expected 0 to {num_classes - 1}, "
            "as in the training images"
        )


class Layout(NamedTuple):
    """Which files a variant of CIFAR has, and how a record begins."""

    train: str  # a glob pattern for any number of files
    test: str
    names: str  # a file with the class names, one per line; it may be missing
    num_classes: int
    label_bytes: int  # the last one is the label

    @property
    def record_bytes(self) -> int:
        return self.label_bytes + _CIFAR_PIXELS


CIFAR10 = Layout("data_batch_*.bin", "test_batch.bin", "batches.meta.txt", num_classes=10, label_bytes=1)
CIFAR100 = Layout("train.bin", "test.bin", "fine_label_names.txt", num_classes=100, label_bytes=2)


def load_cifar(folder: Path, layout: Layout) -> ImageSplits:
    """Load all training files in the order of their names, and the test file."""
    files = sorted(folder.glob(layout.train), key=lambda file: (len(file.name), file.name))  # 2 comes before 10
    if not files:
        raise UserError(f"{folder}: found {layout.test}, but no {layout.train} to train on")
    classes = _class_names(folder / layout.names, layout.num_classes)
    return ImageSplits(_read_cifar(files, layout), _read_cifar([folder / layout.test], layout), classes)


def _read_cifar(files: Sequence[Path], layout: Layout) -> Images:
    left = MAX_IMAGE_SET_BYTES
    parts = []
    for file in files:
        data = read_bounded_file(file, max_bytes=left)
        left -= len(data)
        parts.append(_records(file, data, layout))
    records = torch.from_numpy(np.concatenate(parts))
    pixels = records[:, layout.label_bytes :].reshape(-1, *_CIFAR_SHAPE)
    return Images(pixels.contiguous(), records[:, layout.label_bytes - 1].long())


def _records(file: Path, data: bytes, layout: Layout) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Check the records, and return one row per record."""
    if not data:
        raise UserError(f"{file}: empty")
    whole, rest = divmod(len(data), layout.record_bytes)
    if rest:
        raise UserError(
            f"{file}: record {whole} (from 0) has {rest:,} bytes instead of {layout.record_bytes:,}: "
            "the file is truncated or in another format"
        )
    records = np.frombuffer(data, np.uint8).reshape(whole, layout.record_bytes)
    (wrong,) = np.nonzero(records[:, layout.label_bytes - 1] >= layout.num_classes)
    if len(wrong):
        label = records[wrong[0], layout.label_bytes - 1]
        raise UserError(
            f"{file}: record {wrong[0]} (from 0) has the label {label}: expected 0 to {layout.num_classes - 1}"
        )
    return records


def _class_names(file: Path, num_classes: int) -> tuple[str, ...]:
    if not (file.exists() or file.is_symlink()):
        return tuple(map(str, range(num_classes)))
    try:
        names = [
            line.strip() for line in read_bounded_file(file, _MAX_NAMES_BYTES).decode().splitlines() if line.strip()
        ]
    except UnicodeDecodeError:
        raise UserError(f"{file}: not text: expected the names of {num_classes} classes, one per line") from None
    if len(names) != num_classes or not all(map(str.isprintable, names)):
        raise UserError(f"{file}: {len(names)} names: expected those of {num_classes} classes, printable, one per line")
    return tuple(names)


@contextmanager
def open_bounded(file: Path) -> Iterator[BinaryIO]:
    """Open a regular file, decompressed if its name ends in .gz. Errors while reading become one-line user errors."""
    try:
        if not file.is_file():  # follows links; a folder, a pipe or a device is not one
            is_there = file.exists() or file.is_symlink()
            raise UserError(f"{file}: {'not a regular file' if is_there else 'no such file'}")
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            yield cast(BinaryIO, stream)
    except EOFError:
        raise UserError(f"{file}: the compressed data is truncated: download the file again") from None
    except (OSError, ValueError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def read_bounded_file(file: Path, max_bytes: int = MAX_IMAGE_SET_BYTES) -> bytes:
    """Read the whole file; more than `max_bytes` is an error."""
    with open_bounded(file) as stream:
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise UserError(f"{file}: more than the {max_bytes:,} bytes allowed: train on a part of it")
    return data
