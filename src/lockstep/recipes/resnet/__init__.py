"""Classify images with residual networks: ResNet-18 to ResNet-101, and variants for small images.

This file has the recipe's config, without torch; `recipe.py` has the recipe.
"""

from typing import Annotated, Literal

from pydantic import Field

from lockstep.config.field_types import Flag, Frozen, PositiveInt, Whole
from lockstep.config.train_schema import Config


class ResnetModel(Frozen):
    variant: Literal["cifar18", "cifar20", "cifar32", "cifar56", "resnet18", "resnet34", "resnet50", "resnet101"] = (
        "cifar20"
    )
    width: PositiveInt | None = None  # channels of the first stage; the variant's own if omitted


class ResnetData(Frozen):
    path: str | None = None  # a folder in CIFAR's or MNIST's format; scikit-learn's digits if omitted
    test_every: PositiveInt = 5  # of the digits, image i is a test image when i % test_every == 0
    image_size: PositiveInt | None = None  # what the network sees, in pixels per side; the images' own size if omitted
    padding: Whole = 1  # training images are shifted by up to this many pixels
    flip: Flag = False  # and half of them are mirrored
    show: Whole = 24  # test images to show after training, with the guesses


class ResnetConfig(Config):
    model: ResnetModel = ResnetModel()
    data: ResnetData = ResnetData()
    label_smoothing: Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)] = 0.1


config_class = ResnetConfig
