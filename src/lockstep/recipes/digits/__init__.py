"""Classify handwritten digits: a small conv net on scikit-learn's 1,797 8×8 images, or on your own.

This file has the recipe's config, without torch; `recipe.py` has the recipe.
"""

from lockstep.config.field_types import Frozen, PositiveInt, Whole
from lockstep.config.train_schema import Config


class DigitsModel(Frozen):
    width: PositiveInt = 32  # channels of the first layer


class DigitsData(Frozen):
    path: str | None = None  # a folder in MNIST's or CIFAR's format; scikit-learn's digits if omitted
    test_every: PositiveInt = 5  # of the digits, image i is a test image when i % test_every == 0
    show: Whole = 0  # test images to show after training, with the guesses


class DigitsConfig(Config):
    model: DigitsModel = DigitsModel()
    data: DigitsData = DigitsData()


config_class = DigitsConfig
