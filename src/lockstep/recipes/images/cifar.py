"""CIFAR's binary layout: records of one or two label bytes and 3 × 32 × 32 pixels, red, then green, then blue."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from lockstep.errors import UserError
from lockstep.recipes.images.collection import Images, ImageSplits
from lockstep.recipes.images.reading import MOST_BYTES, read_file

_SHAPE = (3, 32, 32)
_NUM_PIXELS = 3 * 32 * 32
_MOST_NAMES_BYTES = 2**16


class Layout(NamedTuple):
    """Which files there are, and how a record begins."""

    train: str  # a pattern: any number of files
    test: str
    names: str  # of the classes, one a line; this file may be missing
    num_classes: int
    label_bytes: int  # the last of them counts

    @property
    def record_bytes(self) -> int:
        return self.label_bytes + _NUM_PIXELS


CIFAR10 = Layout("data_batch_*.bin", "test_batch.bin", "batches.meta.txt", num_classes=10, label_bytes=1)
CIFAR100 = Layout("train.bin", "test.bin", "fine_label_names.txt", num_classes=100, label_bytes=2)


def load_cifar(folder: Path, layout: Layout) -> ImageSplits:
    """Every training file in the order of the names, and the test file."""
    files = sorted(folder.glob(layout.train), key=lambda file: (len(file.name), file.name))  # 2 comes before 10
    if not files:
        raise UserError(f"{folder}: there is {layout.test}, but no {layout.train} to train on")
    classes = _class_names(folder / layout.names, layout.num_classes)
    return ImageSplits(_read(files, layout), _read([folder / layout.test], layout), classes)


def _read(files: Sequence[Path], layout: Layout) -> Images:
    left = MOST_BYTES
    parts = []
    for file in files:
        data = read_file(file, most=left)
        left -= len(data)
        parts.append(_records(file, data, layout))
    records = torch.from_numpy(np.concatenate(parts))
    pixels = records[:, layout.label_bytes :].reshape(-1, *_SHAPE)
    return Images(pixels.contiguous(), records[:, layout.label_bytes - 1].long())


def _records(file: Path, data: bytes, layout: Layout) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """One row a record, checked."""
    if not data:
        raise UserError(f"{file}: empty")
    whole, rest = divmod(len(data), layout.record_bytes)
    if rest:
        raise UserError(
            f"{file}: record {whole} (from 0) has {rest:,} bytes instead of {layout.record_bytes:,}: "
            "the file is cut short or in another format"
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
        names = [line.strip() for line in read_file(file, _MOST_NAMES_BYTES).decode().splitlines() if line.strip()]
    except UnicodeDecodeError:
        raise UserError(f"{file}: not a text: expected the names of {num_classes} classes, one a line") from None
    if len(names) != num_classes or not all(map(str.isprintable, names)):
        raise UserError(f"{file}: {len(names)} names: expected those of {num_classes} classes, printable, one a line")
    return tuple(names)
