"""Images that are a little different each time, and the same again from the same key."""

import random

import pytest
import torch

from lockstep.data.sample_source import LaneRequest, create_source
from lockstep.errors import UserError
from lockstep.recipes.images.image_splits import Augmented, Images


def coloured(count: int = 6, side: int = 5) -> Images:
    """Return images without equal pixels, and none of them black."""
    pixels = (torch.arange(count * side * side) % 255 + 1).to(torch.uint8).view(count, 1, side, side)
    return Images(pixels, torch.arange(count))


def test_every_shift_and_its_mirror_image_occurs_and_nothing_else() -> None:
    images = coloured(count=1, side=3)
    dataset = Augmented(images, padding=1, flip=True)
    padded = torch.nn.functional.pad(images.pixels[0, 0], [1] * 4)
    windows = [padded[top : top + 3, left : left + 3] for top in range(3) for left in range(3)]
    expected = {tuple(w.flatten().tolist()) for window in windows for w in (window, window.flip(1))}
    random.seed(0)
    drawn = [tuple(dataset[0][0].flatten().tolist()) for _ in range(400)]
    assert set(drawn) == expected
    assert len(expected) == 18


def test_without_padding_and_flip_images_are_unchanged() -> None:
    images = coloured()
    dataset = Augmented(images, padding=0, flip=False)
    assert len(dataset) == 6
    for index in range(6):
        pixels, label = dataset[index]
        assert torch.equal(pixels, images.pixels[index])
        assert label == index


def test_a_sample_does_not_depend_on_those_fetched_with_it() -> None:
    source = create_source(Augmented(coloured(count=40), padding=2, flip=True), None, seed=3)
    together = source.fetch(LaneRequest(epoch=1, lane=0, indices=list(range(40))))[0]
    alone = torch.cat([source.fetch(LaneRequest(epoch=1, lane=7, indices=[index]))[0] for index in range(40)])
    assert torch.equal(together, alone)
    later = source.fetch(LaneRequest(epoch=2, lane=0, indices=list(range(40))))[0]
    assert not torch.equal(together, later)


def test_a_shift_out_of_view_is_refused() -> None:
    with pytest.raises(UserError, match=r"data.padding=5: images of 5 × 5 pixels would be shifted out of view"):
        Augmented(coloured(side=5), padding=5, flip=False)
