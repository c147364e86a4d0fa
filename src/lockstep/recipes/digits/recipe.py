"""The digits recipe: `lockstep train digits`, or `lockstep train digits -n 2 optim.lr=1e-3 data.path=FOLDER`."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import UserError
from lockstep.recipes.digits import DigitsConfig
from lockstep.recipes.images.image_grid import log_guesses
from lockstep.recipes.images.image_source import load_images
from lockstep.recipes.images.image_splits import ImageSplits
from lockstep.train.recipe import Splits
from lockstep.train.run import Run

_DOWNSAMPLING = 4  # in each direction, before the last layer


class ConvNet(nn.Sequential):
    """A sequential network that takes images as bytes, and scales them to 0 … 1."""

    def forward(self, pixels: Tensor) -> Tensor:
        scores: Tensor = super().forward(pixels.float() / 255)  # type: ignore[no-untyped-call]
        return scores


class DigitsRecipe:
    """A convolutional classifier, sized by the images. One instance per run, which loads the images once."""

    config_class = DigitsConfig

    def __init__(self, config: DigitsConfig) -> None:
        self._data = config.data

    @cached_property
    def images(self) -> ImageSplits:
        return load_images(self._data.path, self._data.test_every)

    def model(self, config: DigitsConfig) -> nn.Module:
        channels, height, width = self.images.shape
        if min(height, width) < _DOWNSAMPLING:
            raise UserError(
                f"data.path={config.data.path}: {height} × {width} pixels: expected {_DOWNSAMPLING} or more a side"
            )
        inner = config.model.width
        return ConvNet(
            *_conv_block(channels, inner),
            nn.MaxPool2d(2),
            *_conv_block(inner, 2 * inner),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * inner * (height // _DOWNSAMPLING) * (width // _DOWNSAMPLING), len(self.images.classes)),
        )

    def data(self, config: DigitsConfig) -> Splits:  # noqa: ARG002
        train, test = self.images.train, self.images.test
        return Splits(TensorDataset(train.pixels, train.labels), TensorDataset(test.pixels, test.labels))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        pixels, labels = batch
        return F.cross_entropy(model(pixels), labels, reduction="sum"), len(labels)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor | float, int]]:
        pixels, labels = batch
        scores = model(pixels)
        return {
            "accuracy": ((scores.argmax(1) == labels).sum(), len(labels)),
            "loss": (F.cross_entropy(scores, labels, reduction="sum"), len(labels)),
        }

    def conclude(self, run: Run, model: nn.Module, config: DigitsConfig) -> None:
        log_guesses(run, model, self.images, config.data.show)


recipe = DigitsRecipe


def _conv_block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
