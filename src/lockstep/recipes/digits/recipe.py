"""Run it: `lockstep train digits`, or `lockstep train digits -n 2 optim.lr=1e-3 model.width=64 data.path=FOLDER`."""

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config.fields import Count, Frozen, Whole
from lockstep.config.schema import Config
from lockstep.errors import UserError
from lockstep.recipes.images.collection import Images, ImageSplits
from lockstep.recipes.images.guesses import show_guesses
from lockstep.recipes.images.source import load_images
from lockstep.train.recipe import Splits
from lockstep.train.run import Run

_SHRINKS = 4  # times, in each direction, before the last layer


class DigitsModel(Frozen):
    width: Count = 32  # channels of the first layer


class DigitsData(Frozen):
    path: str | None = None  # a folder in MNIST's or CIFAR's format; scikit-learn's digits if there is none
    test_every: Count = 5  # of those, the image with index i is a test image when i % test_every == 0
    show: Whole = 0  # test images to show after training, with the guesses


class DigitsConfig(Config):
    model: DigitsModel = DigitsModel()
    data: DigitsData = DigitsData()


class ConvNet(nn.Sequential):
    """Its layers see the images' bytes as numbers from 0 to 1."""

    def forward(self, pixels: Tensor) -> Tensor:
        scores: Tensor = super().forward(pixels.float() / 255)  # type: ignore[no-untyped-call]
        return scores


class Digits:
    """A convolutional classifier, as large as the images ask for."""

    config_class = DigitsConfig

    def model(self, config: DigitsConfig) -> nn.Module:
        images = _images(config)
        channels, height, width = images.shape
        if min(height, width) < _SHRINKS:
            raise UserError(
                f"data.path={config.data.path}: {height} × {width} pixels: expected {_SHRINKS} or more a side"
            )
        inner = config.model.width
        return ConvNet(
            *_conv_block(channels, inner),
            nn.MaxPool2d(2),
            *_conv_block(inner, 2 * inner),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * inner * (height // _SHRINKS) * (width // _SHRINKS), len(images.classes)),
        )

    def data(self, config: DigitsConfig) -> Splits:
        train, test, _ = _images(config)
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
        """Show the first test images. All ranks ask the model: each may have only a part of it."""
        if config.data.show:
            images = _images(config)
            first = Images(*(tensor[: config.data.show] for tensor in images.test))
            guesses = show_guesses(model, first, images.classes, run.world.device)
            run.log_image("guesses", guesses.picture)
            run.log_text("guesses", guesses.text)


recipe = Digits()


def _images(config: DigitsConfig) -> ImageSplits:
    return load_images(config.data.path, config.data.test_every)


def _conv_block(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
