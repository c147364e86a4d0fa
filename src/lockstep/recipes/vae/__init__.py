"""A variational autoencoder of images: compress them into a few numbers, and draw new ones.

This file has the recipe's config, without torch; `recipe.py` has the recipe.
"""

from typing import Literal

from lockstep.config.field_types import Frozen, NonNegative, PositiveInt, Whole
from lockstep.config.train_schema import Config

LikelihoodKind = Literal["bernoulli", "gaussian"]


class VaeModel(Frozen):
    image: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None  # channels, height, width; default: the data's
    latent: PositiveInt = 16  # numbers that an image is compressed into
    width: PositiveInt = 32  # channels of the first layer
    likelihood: LikelihoodKind = "bernoulli"  # bernoulli for ink on paper, gaussian for any values
    beta: NonNegative = 1.0  # weight of the KL term; above 1, simpler codes and coarser images
    beta_warmup: Whole = 0  # steps over which beta rises from near 0


class VaeData(Frozen):
    path: str | None = None  # a folder in CIFAR's or MNIST's format; scikit-learn's digits if omitted
    test_every: PositiveInt = 5  # of the digits, image i is a test image when i % test_every == 0
    drawn: Whole = 1000  # images to generate after training and compare with real ones; 0: none


class VaeConfig(Config):
    model: VaeModel = VaeModel()
    data: VaeData = VaeData()


config_class = VaeConfig
