"""Small data sets in the standard formats, for tests to read or to damage."""

import gzip
import struct
from pathlib import Path

import numpy as np


def write_cifar(folder: Path, train: int = 40, test: int = 20, files: int = 2, label_bytes: int = 1) -> Path:
    """Labels cycle; an image's brightness depends on its label, so that it can be learned."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"data_batch_{number + 1}.bin" for number in range(files)] if label_bytes == 1 else ["train.bin"]
    for number, name in enumerate(names):
        (folder / name).write_bytes(cifar_records(train // len(names), number, label_bytes))
    (folder / ("test_batch.bin" if label_bytes == 1 else "test.bin")).write_bytes(cifar_records(test, 99, label_bytes))
    return folder


def cifar_records(count: int, seed: int, label_bytes: int = 1) -> bytes:
    labels = np.arange(count) % 10
    noise = np.random.default_rng(seed).integers(0, 20, (count, 3072))
    pixels = (noise + 25 * labels[:, None]).astype(np.uint8)
    unused = np.full((count, label_bytes - 1), 255, np.uint8)  # CIFAR-100's other label
    return np.hstack([unused, labels[:, None].astype(np.uint8), pixels]).tobytes()


def write_idx(folder: Path, train: int = 40, test: int = 20, side: int = 12, packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", train), ("t10k", test)):
        labels = (np.arange(count) % 10).astype(np.uint8)
        pixels = np.broadcast_to((25 * labels)[:, None, None], (count, side, side)).copy()
        pixels[:, 0, 0] = np.arange(count)
        for name, numbers in (("images-idx3", pixels), ("labels-idx1", labels)):
            write_numbers(folder / f"{split}-{name}-ubyte{'.gz' if packed else ''}", numbers)
    return folder


def write_numbers(file: Path, numbers: np.ndarray) -> None:  # type: ignore[type-arg]
    data = bytes([0, 0, 8, numbers.ndim]) + struct.pack(f">{numbers.ndim}I", *numbers.shape) + numbers.tobytes()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)
