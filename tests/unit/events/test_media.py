"""Images become PNG files inside the folder, text fits into an event, and all else is one clear error."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.errors import UserError
from lockstep.events.media import bounded, check_image, check_name, file_name, place_image
from lockstep.events.png import encode_png, pixels_of

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
def test_what_can_be_shown(image: Any, pixels: np.ndarray) -> None:
    check_image("a", image)
    shown = pixels_of(image)
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
def test_what_cannot_is_one_clear_error(image: Any) -> None:
    with pytest.raises(UserError, match=r"^image 'a': expected .* height × width.*; got ") as caught:
        check_image("a", image)
    assert len(str(caught.value).splitlines()) == 1


def test_the_error_names_type_and_shape() -> None:
    with pytest.raises(UserError, match=r"got torch\.int64, 2 × 7$"):
        check_image("a", torch.zeros(2, 7, dtype=torch.int64))


def test_an_image_is_placed_by_name_and_step_and_replaced_as_a_whole(tmp_path: Path) -> None:
    assert place_image(tmp_path, "samples", 100, GREY) == "media/samples-100.png"
    assert place_image(tmp_path, "samples", 100, COLOUR) == "media/samples-100.png"
    assert np.array_equal(decoded((tmp_path / "media/samples-100.png").read_bytes()), COLOUR)
    assert [path.name for path in (tmp_path / "media").iterdir()] == ["samples-100.png"]


@pytest.mark.parametrize("name", ["../../out", "/etc/x", "..", ".", "a/b", "a\\b", "a b", "C:x", "ü", ".hidden"])
def test_no_name_leaves_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / place_image(folder, name, 1, GREY)
    assert path.resolve().parent == folder / "media"
    assert path.is_file()
    assert not path.name.startswith(".")
    assert list(tmp_path.iterdir()) == [folder]


def test_names_that_differ_stay_apart() -> None:
    names = ["a/b", "a_b", "a b", "a.b", ".a", "a", "..a"]
    assert len({file_name(name) for name in names}) == len(names)


@pytest.mark.parametrize("name", ["", "a\nb", "a\0", "x" * 101, 3])
def test_a_name_is_short_and_printable(name: Any) -> None:
    for check in (check_name, lambda given: check_image(given, GREY)):
        refused: Callable[[Any], None] = check
        with pytest.raises(UserError, match="is no name"):
            refused(name)


def test_text_is_kept_up_to_its_bound_and_the_cut_is_said() -> None:
    assert bounded("é" * 32768) == "é" * 32768
    cut = bounded("é" * 32769)
    assert cut.startswith("é" * 32768 + "\n")
    assert cut.endswith("cut here: 65,538 bytes, of which an event holds 65,536")
    assert bounded("a" + "é" * 32768).startswith("a" + "é" * 32767 + "\n")  # never half a character
    assert len(json.dumps(bounded("\0" * 10**6))) < 2**20  # what readers of events take for a line
    assert bounded("\ud800") == "?"
