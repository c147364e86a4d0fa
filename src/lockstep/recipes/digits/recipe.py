"""Run it: `lockstep train digits`, or `lockstep train digits -n 2 optim.lr=1e-3 model.width=64`."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config.fields import Count, Frozen
from lockstep.config.schema import Config
from lockstep.errors import UserError
from lockstep.train.recipe import Splits


class DigitsModel(Frozen):
    width: Count = 32  # channels of the first layer


class DigitsData(Frozen):
    test_every: Count = 5  # the image with index i is a test image when i % test_every == 0


class DigitsConfig(Config):
    model: DigitsModel = DigitsModel()
    data: DigitsData = DigitsData()


class Digits:
    """A convolutional classifier; the split is by index, so that it is the same everywhere."""

    config_class = DigitsConfig

    def model(self, config: DigitsConfig) -> nn.Module:
        width = config.model.width
        return nn.Sequential(
            *_conv_block(1, width),
            nn.MaxPool2d(2),
            *_conv_block(width, 2 * width),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * width * 2 * 2, 10),
        )

    def data(self, config: DigitsConfig) -> Splits:
        images, labels = _load()
        is_test = torch.arange(len(labels)) % config.data.test_every == 0
        return Splits(
            train=TensorDataset(images[~is_test], labels[~is_test]),
            test=TensorDataset(images[is_test], labels[is_test]),
        )

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        images, labels = batch
        return F.cross_entropy(model(images), labels, reduction="sum"), len(labels)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor | float, int]]:
        images, labels = batch
        scores = model(images)
        return {
            "accuracy": ((scores.argmax(1) == labels).sum(), len(labels)),
            "loss": (F.cross_entropy(scores, labels, reduction="sum"), len(labels)),
        }


recipe = Digits()


def _conv_block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]


def _load() -> tuple[Tensor, Tensor]:
    """Images of shape (1797, 1, 8, 8) scaled to 0 … 1, and their labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the digits recipe needs scikit-learn: pip install 'lockstep-train[digits]'") from None
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)
