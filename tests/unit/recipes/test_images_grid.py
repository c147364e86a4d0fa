"""Many images as one."""

import pytest
import torch

from lockstep.recipes.images.grid import mosaic


def test_images_stand_in_rows_with_a_white_line_between_them() -> None:
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


def test_values_outside_are_cut_off_and_the_model_is_not_held_on_to() -> None:
    images = torch.tensor([-1.0, 0.5, 2.0], requires_grad=True).view(3, 1, 1, 1).bfloat16()
    made = mosaic(images, columns=3)
    assert not made.requires_grad
    assert made[0, 0, [0, 65, 130]].tolist() == [0, 0.5, 1]
