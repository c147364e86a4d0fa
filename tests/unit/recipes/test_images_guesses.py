"""The picture of what a classifier makes of images."""

import torch
from torch import Tensor, nn

from lockstep.recipes.images.collection import Images
from lockstep.recipes.images.guesses import show_guesses


class Fixed(nn.Module):
    """Takes an image for the class that its first pixel says."""

    def forward(self, pixels: Tensor) -> Tensor:
        assert not self.training
        return nn.functional.one_hot(pixels[:, 0, 0, 0].long(), 3)


def test_right_ones_are_framed_in_green_and_wrong_ones_in_red() -> None:
    pixels = torch.tensor([0, 1, 2]).to(torch.uint8).view(3, 1, 1, 1).repeat(1, 1, 32, 32)
    model = Fixed()
    shown = show_guesses(
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
    shown = show_guesses(Fixed(), Images(pixels, torch.tensor([0])), "abc", torch.device("cpu")).picture
    side = shown.shape[1]
    assert shown[:, side // 2, side // 2].tolist() == [0, 0, 1]
