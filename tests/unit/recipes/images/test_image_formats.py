"""Reading CIFAR's and MNIST's formats, whole and damaged."""

import gzip
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.errors import UserError
from lockstep.recipes.images import image_formats
from lockstep.recipes.images.image_source import load_images
from tests.shared_data import shared_data
from tests.unit.recipes.image_files import cifar_records, write_cifar, write_idx, write_numbers

RECORD = 3073


def test_cifar_10_is_read_file_by_file_in_the_order_of_numbers(tmp_path: Path) -> None:
    folder = write_cifar(tmp_path / "c", train=110, files=11)
    images = load_images(str(folder))
    assert images.shape == (3, 32, 32)
    assert images.train.pixels.dtype == torch.uint8
    assert images.train.pixels.shape == (110, 3, 32, 32)
    assert images.test.labels.tolist() == [*range(10)] * 2
    assert images.classes == tuple("0123456789")
    second = np.frombuffer((folder / "data_batch_2.bin").read_bytes(), np.uint8).reshape(10, RECORD)
    assert np.array_equal(images.train.pixels[13].numpy().reshape(-1), second[3, 1:]), "2 comes before 10"
    (folder / "batches.meta.txt").write_text("\n".join(f"name{i}" for i in range(10)) + "\n\n")
    assert load_images(str(folder)).classes[3] == "name3"


def test_cifar_100_has_two_labels_of_which_the_second_counts(tmp_path: Path) -> None:
    images = load_images(str(write_cifar(tmp_path, label_bytes=2)))
    assert images.train.labels.tolist() == [*range(10)] * 4
    assert len(images.classes) == 100
    assert images.train.pixels.shape == (40, 3, 32, 32)
    assert int(images.train.pixels[9].min()) >= 225, "pixels begin after both"


def test_the_real_cifar_10_is_read() -> None:
    images = load_images(str(shared_data("cifar-10-batches-bin")))
    assert images.train.pixels.shape[1:] == images.test.pixels.shape[1:] == (3, 32, 32)
    assert len(images.classes) == 10
    assert "frog" in images.classes
    assert images.train.labels.unique().tolist() == list(range(10))


@pytest.mark.parametrize("packed", [False, True])
def test_mnists_format_is_read_plain_and_packed(packed: bool, tmp_path: Path) -> None:
    images = load_images(str(write_idx(tmp_path, packed=packed)))
    assert images.shape == (1, 12, 12)
    assert images.train.pixels[:, 0, 0, 0].tolist() == list(range(40)), "in order"
    assert images.train.pixels[7, 0, 5, 5] == 7 * 25
    assert images.test.labels.tolist() == [*range(10)] * 2
    assert len(images.classes) == 10


def test_links_to_files_and_a_home_folder_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_cifar(tmp_path / "real")
    (tmp_path / "home").mkdir()
    for file in folder.iterdir():
        (tmp_path / "home" / file.name).symlink_to(file)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load_images("~/home").train.labels) == 40


Damage = Callable[[Path], object]

CIFAR_DAMAGE: dict[str, tuple[str, Damage, str]] = {
    "cut short": (
        "data_batch_2.bin",
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        r"record 19 \(from 0\) has 3,072 bytes instead of 3,073",
    ),
    "another size": ("test_batch.bin", lambda file: file.write_bytes(b"x" * 784), r"record 0 .* has 784 bytes"),
    "one byte more": (
        "test_batch.bin",
        lambda file: file.write_bytes(file.read_bytes() + b"x"),
        r"record 20 .* has 1 bytes",
    ),
    "label": (
        "data_batch_2.bin",
        lambda file: file.write_bytes(cifar_records(7, 0) + bytes([10]) + bytes(3072)),
        r"record 7 \(from 0\) has the label 10: expected 0 to 9",
    ),
    "empty": ("data_batch_1.bin", lambda file: file.write_bytes(b""), "empty"),
    "no test": ("test_batch.bin", lambda file: file.unlink(), "no such file"),
    "folder": ("test_batch.bin", lambda file: (file.unlink(), file.mkdir()), "not a regular file"),
    "pipe": ("data_batch_1.bin", lambda file: (file.unlink(), os.mkfifo(file)), "not a regular file"),
    "device": ("test_batch.bin", lambda file: (file.unlink(), file.symlink_to("/dev/zero")), "not a regular file"),
    "broken link": ("test_batch.bin", lambda file: (file.unlink(), file.symlink_to("no")), "not a regular file"),
    "link in a circle": ("test_batch.bin", lambda file: (file.unlink(), file.symlink_to(file)), "not a regular file"),
    "unreadable": (
        "test_batch.bin",
        lambda file: (file.unlink(), file.symlink_to("/proc/self/mem")),
        "cannot be read: Input/output error",
    ),
    "names missing": ("batches.meta.txt", lambda file: file.write_text("one\ntwo\n"), "2 names: expected those of 10"),
    "names no text": ("batches.meta.txt", lambda file: file.write_bytes(b"\xff" * 9), "not text"),
    "names that a terminal obeys": (
        "batches.meta.txt",
        lambda file: file.write_text("\x1b[2J\n" * 10),
        "expected those of 10 classes, printable",
    ),
    "names without end": (
        "batches.meta.txt",
        lambda file: file.write_bytes(b"x\n" * 40_000),
        "more than the 65,536 bytes",
    ),
}


@pytest.mark.parametrize("case", CIFAR_DAMAGE)
def test_damaged_cifar_names_file_and_record_in_one_line(case: str, tmp_path: Path) -> None:
    name, damage, expected = CIFAR_DAMAGE[case]
    damage(write_cifar(tmp_path) / name)
    with pytest.raises(UserError, match=f"^{tmp_path}/{name}: .*{expected}") as caught:
        load_images(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


def header(*sizes: int) -> bytes:
    return bytes([0, 0, 8, len(sizes)]) + struct.pack(f">{len(sizes)}I", *sizes)


IDX_DAMAGE: dict[str, tuple[str, Damage, str]] = {
    "cut short": (
        "train-images-idx3-ubyte",
        lambda file: file.write_bytes(file.read_bytes()[:-145]),
        r"ends in record 38 \(from 0\) of 40: the file is truncated",
    ),
    "too long": ("t10k-labels-idx1-ubyte", lambda file: file.write_bytes(file.read_bytes() + b"x"), "more data than"),
    "magic": (
        "train-images-idx3-ubyte",
        lambda file: file.write_bytes(b"\x89PNG" + file.read_bytes()),
        "begins with 89 50 4e 47: expected 00 00 08 03",
    ),
    "floats": (
        "train-images-idx3-ubyte",
        lambda file: file.write_bytes(b"\0\0\x0d\x03" + file.read_bytes()[4:]),
        "begins with 00 00 0d 03",
    ),
    "labels for images": (
        "train-images-idx3-ubyte",
        lambda file: file.write_bytes(file.with_name("train-labels-idx1-ubyte").read_bytes()),
        "begins with 00 00 08 01",
    ),
    "header": ("t10k-images-idx3-ubyte", lambda file: file.write_bytes(file.read_bytes()[:9]), "header is truncated"),
    "empty": ("t10k-images-idx3-ubyte", lambda file: file.write_bytes(b""), "empty"),
    "nothing": ("t10k-images-idx3-ubyte", lambda file: file.write_bytes(header(0, 12, 12)), "there is nothing to read"),
    "huge": (
        "train-images-idx3-ubyte",
        lambda file: file.write_bytes(header(2**32 - 1, 2**32 - 1, 2**32 - 1)),
        "announces 4,294,967,295 × .* more than the 1,073,741,824",
    ),
    "counts": (
        "train-labels-idx1-ubyte",
        lambda file: write_numbers(file, np.zeros(39, np.uint8)),
        "39 labels for the 40 images of train-images-idx3-ubyte",
    ),
    "size": (
        "t10k-images-idx3-ubyte",
        lambda file: write_numbers(file, np.zeros((20, 12, 13), np.uint8)),
        "images of 12 × 13 pixels, but the training images have 12 × 12",
    ),
    "label": (
        "train-labels-idx1-ubyte",
        lambda file: write_numbers(file, np.array([*range(10)] * 3 + [0, 200] * 5, np.uint8)),
        r"record 31 \(from 0\) has the label 200, but no training image has 10",
    ),
    "test label": (
        "t10k-labels-idx1-ubyte",
        lambda file: write_numbers(file, np.array([0] * 19 + [10], np.uint8)),
        r"record 19 \(from 0\) has the label 10: expected 0 to 9",
    ),
    "no test": ("t10k-images-idx3-ubyte", lambda file: file.unlink(), "no such file"),
    "no labels": ("train-labels-idx1-ubyte", lambda file: file.unlink(), "no such file"),
    "folder": ("train-labels-idx1-ubyte", lambda file: (file.unlink(), file.mkdir()), "not a regular file"),
}


@pytest.mark.parametrize("case", IDX_DAMAGE)
def test_damaged_idx_names_file_and_record_in_one_line(case: str, tmp_path: Path) -> None:
    name, damage, expected = IDX_DAMAGE[case]
    damage(write_idx(tmp_path) / name)
    with pytest.raises(UserError, match=f"^{tmp_path}/{name}: .*{expected}") as caught:
        load_images(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


PACKED_DAMAGE: dict[str, tuple[Damage, str]] = {
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-12]), "the compressed data is truncated"),
    "not packed": (lambda file: file.write_bytes(b"plainly not"), "cannot be read: Not a gzipped file"),
    "damaged": (
        lambda file: file.write_bytes(file.read_bytes()[:10] + b"\xff" * 40),
        "cannot be read: Error -3 while decompressing",
    ),
    "checksum": (
        lambda file: file.write_bytes(file.read_bytes()[:-8] + bytes(8)),
        "cannot be read: CRC check failed|more data",
    ),
}


@pytest.mark.parametrize("case", PACKED_DAMAGE)
def test_damaged_packed_files_are_refused(case: str, tmp_path: Path) -> None:
    damage, expected = PACKED_DAMAGE[case]
    file = write_idx(tmp_path, packed=True) / "train-images-idx3-ubyte.gz"
    damage(file)
    with pytest.raises(UserError, match=f"^{file}: (?:{expected})"):
        load_images(str(tmp_path))


def test_a_zip_bomb_is_unpacked_no_further_than_its_header_announces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_idx(tmp_path, packed=True) / "train-images-idx3-ubyte.gz"
    file.write_bytes(gzip.compress(header(40, 12, 12) + bytes(2**22)))
    unpacked: list[int] = []
    read = gzip.GzipFile.read

    def counted(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        data = read(self, size)
        unpacked.append(len(data))
        return data

    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    with pytest.raises(UserError, match=f"^{file}: more data than its header announces"):
        load_images(str(tmp_path))
    assert sum(unpacked) == 16 + 40 * 12 * 12 + 1


def test_no_more_is_read_than_the_limit_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert image_formats.MAX_IMAGE_SET_BYTES == 2**30
    folder = write_cifar(tmp_path / "cifar")
    monkeypatch.setattr(image_formats, "MAX_IMAGE_SET_BYTES", 30 * RECORD)
    with pytest.raises(UserError, match=r"data_batch_2.bin: more than the 30,730 bytes allowed"):
        load_images(str(folder))
    monkeypatch.setattr(image_formats, "MAX_IMAGE_SET_BYTES", 5000)
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte: .* announces 40 × 12 × 12 .* more than the 5,000"):
        load_images(str(write_idx(tmp_path / "idx")))


def test_a_folder_without_known_files_is_an_error_that_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.path=.*no images in a known format: .*data_batch_\*.bin.*found nothing"):
        load_images(str(tmp_path))
    for name in ("a.jpg", "b\x1b.jpg", "c", "d", "e", "f"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"found 'a.jpg', 'b\\x1b.jpg', 'c', 'd', 'e', …$"):
        load_images(str(tmp_path))
    with pytest.raises(UserError, match=r"data.path=.*/c: not a folder"):
        load_images(str(tmp_path / "c"))
    with pytest.raises(UserError, match=r"data.path=nowhere: no such folder \(from "):
        load_images("nowhere")
    with pytest.raises(UserError, match=r"cannot be read"):
        load_images("x" * 5000)
    with pytest.raises(UserError, match=r"data.path="):
        load_images("a\0b")


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError, match=r"the digits need scikit-learn: pip install 'lockstep-train\[digits\]'"):
        load_images(None)


def test_a_test_file_without_a_training_file_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    for number in (1, 2):
        (tmp_path / f"data_batch_{number}.bin").unlink()
    with pytest.raises(UserError, match=r"found test_batch.bin, but no data_batch_\*.bin to train on"):
        load_images(str(tmp_path))


def test_an_unknown_home_folder_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.path=~nobody-of-that-name/images: cannot be read: Could not determine"):
        load_images("~nobody-of-that-name/images")


def test_digits_of_which_none_is_left_to_train_on_are_refused() -> None:
    with pytest.raises(UserError, match=r"data.test_every=1: .*: expected 2 or more"):
        load_images(None, test_every=1)
