"""scikit-learn's 1,797 real handwritten digits of 8 × 8 pixels: no download."""

import torch

from lockstep.errors import UserError
from lockstep.recipes.images.collection import Images, ImageSplits

_BRIGHTEST = 16


def load_digits(test_every: int = 5) -> ImageSplits:
    """The image with index i is a test image when i % test_every == 0, so that the split is the same everywhere."""
    if test_every == 1:
        raise UserError("data.test_every=1: every digit is for the test, none is left to train on: expected 2 or more")
    try:
        from sklearn import datasets
    except ImportError:
        raise UserError(
            "the digits need scikit-learn: pip install 'lockstep-train[digits]', or give data.path=FOLDER"
        ) from None
    digits = datasets.load_digits()
    pixels = (torch.tensor(digits.images) * (255 / _BRIGHTEST)).round().to(torch.uint8).unsqueeze(1)
    labels = torch.tensor(digits.target)
    is_test = torch.arange(len(labels)) % test_every == 0
    train, test = (Images(pixels[chosen], labels[chosen]) for chosen in (~is_test, is_test))
    return ImageSplits(train, test, tuple("0123456789"))
