"""Images become PNG files in the run folder, text fits into an event, and anything else is one clear error."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.errors import UserError
from lockstep.events.media import (
    check_image,
    check_media_name,
    encode_png,
    media_file_name,
    to_pixels,
    truncate_text,
    write_image,
)

GREY = np.arange(15, dtype=np.uint8).reshape(3, 5) * 17
COLOUR = np.random.default_rng(0).integers(0, 256, (4, 5, 3), dtype=np.uint8)


def decoded(png: bytes) -> np.ndarray:
    image = Image.open(io.BytesIO(png))
    image.load()  # checks the chunks' sums too
    return np.asarray(image)


@pytest.mark.parametrize(
    "pixels", [GREY, COLOUR, COLOUR[:, ::2], COLOUR[:1, :1]], ids=["grey", "colour", "view", "one"]
)
def test_a_png_reads_back_as_the_same_pixels(pixels: np.ndarray) -> None:
    assert np.array_equal(decoded(encode_png(pixels)), pixels)


@pytest.mark.parametrize(
    ("image", "pixels"),
    [
        (GREY, GREY),
        (COLOUR, COLOUR),
        (COLOUR.transpose(2, 0, 1), COLOUR),
        (GREY[None], GREY),
        (COLOUR / 255, COLOUR),
        (torch.from_numpy(GREY), GREY),
        (torch.from_numpy(COLOUR).permute(2, 0, 1), COLOUR),
        ((torch.from_numpy(COLOUR) / 255).requires_grad_(), COLOUR),
        (torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16), np.array([[0, 255]])),
        (torch.tensor([[-3.0, 0.5, 2.0, float("nan"), float("inf")]]), np.array([[0, 128, 255, 0, 255]])),
    ],
    ids="grey colour first one float tensor tensor-first grad bf16 clipped".split(),  # noqa: SIM905
)
def test_images_that_can_be_shown(image: Any, pixels: np.ndarray) -> None:
    check_image("a", image)
    shown = to_pixels(image)
    assert shown.dtype == np.uint8
    assert np.array_equal(shown, pixels)


@pytest.mark.parametrize(
    "image",
    [
        np.zeros(3),
        np.zeros((2, 5, 5)),
        np.zeros((4, 5, 4)),
        np.zeros((1, 3, 5, 5)),
        np.zeros((0, 5)),
        np.zeros((4, 5), np.int64),
        np.zeros((4, 5), bool),
        torch.zeros(4, 5, dtype=torch.complex64),
        [[0.5]],
        "image.png",
    ],
)
def test_images_that_cannot_be_shown_are_refused_with_one_line(image: Any) -> None:
    with pytest.raises(UserError, match=r"^image 'a': expected .* height × width.*; got ") as caught:
        check_image("a", image)
    assert len(str(caught.value).splitlines()) == 1


def test_the_error_names_type_and_shape() -> None:
    with pytest.raises(UserError, match=r"got torch\.int64, 2 × 7$"):
        check_image("a", torch.zeros(2, 7, dtype=torch.int64))


def test_an_image_is_written_by_name_and_step_and_replaced_atomically(tmp_path: Path) -> None:
    assert write_image(tmp_path, "samples", 100, GREY) == "media/samples-100.png"
    assert write_image(tmp_path, "samples", 100, COLOUR) == "media/samples-100.png"
    assert np.array_equal(decoded((tmp_path / "media/samples-100.png").read_bytes()), COLOUR)
    assert [path.name for path in (tmp_path / "media").iterdir()] == ["samples-100.png"]


@pytest.mark.parametrize("name", ["../../out", "/etc/x", "..", ".", "a/b", "a\\b", "a b", "C:x", "ü", ".hidden"])
def test_no_name_leaves_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / write_image(folder, name, 1, GREY)
    assert path.resolve().parent == folder / "media"
    assert path.is_file()
    assert not path.name.startswith(".")
    assert list(tmp_path.iterdir()) == [folder]


def test_names_that_differ_stay_apart() -> None:
    names = ["a/b", "a_b", "a b", "a.b", ".a", "a", "..a"]
    assert len({media_file_name(name) for name in names}) == len(names)


@pytest.mark.parametrize("name", ["", "a\nb", "a\0", "x" * 101, 3])
def test_a_name_is_short_and_printable(name: Any) -> None:
    with pytest.raises(UserError, match="is not a valid name"):
        check_media_name(name)
    with pytest.raises(UserError, match="is not a valid name"):
        check_image(name, GREY)


def test_long_text_is_cut_and_says_so() -> None:
    assert truncate_text("é" * 32768) == "é" * 32768
    cut = truncate_text("é" * 32769)
    assert cut.startswith("é" * 32768 + "\n")
    assert cut.endswith("cut here: the text has 65,538 bytes, and an event holds 65,536")
    assert truncate_text("a" + "é" * 32768).startswith("a" + "é" * 32767 + "\n")  # never half a character
    assert len(json.dumps(truncate_text("\0" * 10**6))) < 2**20  # what readers of events take for a line
    assert truncate_text("\ud800") == "?"
