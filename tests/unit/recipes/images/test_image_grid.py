"""Many images arranged in one."""

import pytest
import torch
from torch import Tensor, nn

from lockstep.recipes.images.image_grid import draw_guesses, mosaic
from lockstep.recipes.images.image_splits import Images


def test_images_are_placed_in_rows_with_white_lines_between_them() -> None:
    images = torch.arange(5).view(5, 1, 1, 1) / 10 * torch.ones(5, 3, 64, 64)
    made = mosaic(images, columns=3)
    assert made.shape == (3, 2 * 64 + 1, 3 * 64 + 2)
    for number in range(5):
        top, left = number // 3 * 65, number % 3 * 65
        assert (made[:, top : top + 64, left : left + 64] == number / 10).all()
    assert (made[:, 64] == 1).all()
    assert (made[:, :, 64] == 1).all()
    assert (made[:, 65:, 130:] == 1).all(), "the place that is left over"


@pytest.mark.parametrize(("side", "shown"), [(8, 64), (28, 56), (32, 64), (64, 64), (224, 224)])
def test_small_images_are_enlarged_by_whole_factors(side: int, shown: int) -> None:
    image = torch.rand(1, 1, side, side)
    made = mosaic(image, columns=4)
    assert made.shape == (1, shown, shown), "no empty columns either"
    assert torch.equal(made[:, :: shown // side, :: shown // side], image[0])


def test_values_are_clipped_and_detached_from_the_model() -> None:
    images = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True).view(3, 1, 1, 1).bfloat16()
    made = mosaic(images, columns=3)
    assert not made.requires_grad
    assert made[0, 0, [0, 65, 130]].tolist() == [0, 0.5, 1]


class Fixed(nn.Module):
    """Predicts the class that an image's first pixel names."""

    def forward(self, pixels: Tensor) -> Tensor:
        assert not self.training
        return nn.functional.one_hot(pixels[:, 0, 0, 0].long(), 3)


def test_right_ones_are_framed_in_green_and_wrong_ones_in_red() -> None:
    pixels = torch.tensor([0, 1, 2]).to(torch.uint8).view(3, 1, 1, 1).repeat(1, 1, 32, 32)
    model = Fixed()
    shown = draw_guesses(
        model, Images(pixels, torch.tensor([0, 2, 2])), ("cat", "dog", "frog"), torch.device("cpu"), columns=2
    )
    assert shown.text == "cat, dog (is frog)\nfrog"
    assert model.training
    side = 2 * (32 + 2 * 2)
    assert shown.picture.shape == (3, 2 * side + 1, 2 * side + 1)
    corners = [shown.picture[:, top, left] for top, left in ((0, 0), (0, side + 1), (side + 1, 0))]
    assert [int(corner.argmax()) for corner in corners] == [1, 0, 1], "green, red, green"
    assert (shown.picture[:, 4:68, 4:68] == 0).all(), "the image itself is not painted over"
    assert torch.allclose(shown.picture[:, 3, :72].max(0).values, torch.tensor(0.75)), "the frame's whole width"


def test_images_with_three_channels_keep_their_colours() -> None:
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    pixels[:, 2] = 255
    shown = draw_guesses(Fixed(), Images(pixels, torch.tensor([0])), "abc", torch.device("cpu")).picture
    side = shown.shape[1]
    assert shown[:, side // 2, side // 2].tolist() == [0, 0, 1]
