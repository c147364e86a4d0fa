"""Run it: `lockstep train resnet`, or `lockstep train resnet -n 2 data.path=FOLDER model.variant=cifar18`."""

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config.fields import Count, Flag, Frozen, Whole
from lockstep.config.schema import Config
from lockstep.recipes.images.augmentation import Augmented
from lockstep.recipes.images.collection import Images, ImageSplits
from lockstep.recipes.images.guesses import show_guesses
from lockstep.recipes.images.source import load_images
from lockstep.recipes.resnet.network import VARIANTS, Residual
from lockstep.train.recipe import Splits
from lockstep.train.run import Run

_TOP = 5  # guesses, of which one is right
_LEAST_SPREAD = 1e-3  # of a channel that is the same everywhere


class ResnetModel(Frozen):
    variant: Literal["cifar18", "cifar20", "cifar32", "cifar56", "resnet18", "resnet34", "resnet50", "resnet101"] = (
        "cifar20"
    )
    width: Count | None = None  # channels of the first stage; the variant's own if left out


class ResnetData(Frozen):
    path: str | None = None  # a folder in CIFAR's or MNIST's format; scikit-learn's digits if there is none
    test_every: Count = 5  # of the digits, one in so many is a test image
    image_size: Count | None = None  # what the network sees, in pixels a side; the images' own size if left out
    padding: Whole = 1  # images to train on are shifted by up to so many pixels
    flip: Flag = False  # and half of them mirrored
    show: Whole = 24  # test images to show after training, with the guesses


class ResnetConfig(Config):
    model: ResnetModel = ResnetModel()
    data: ResnetData = ResnetData()
    label_smoothing: Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)] = 0.1


class Resnet:
    """A classifier of images; its config says which."""

    config_class = ResnetConfig

    def __init__(self, config: ResnetConfig) -> None:
        self._data = config.data
        self._label_smoothing = config.label_smoothing

    @cached_property
    def images(self) -> ImageSplits:
        return load_images(self._data.path, self._data.test_every)

    def model(self, config: ResnetConfig) -> nn.Module:
        variant = VARIANTS[config.model.variant]
        if config.model.width is not None:
            variant = variant._replace(width=config.model.width)
        mean, spread = _mean_and_spread(self.images.train.pixels)
        return Residual(variant, len(self.images.classes), mean, spread, config.data.image_size)

    def data(self, config: ResnetConfig) -> Splits:
        train, test = self.images.train, self.images.test
        return Splits(Augmented(train, config.data.padding, config.data.flip), TensorDataset(test.pixels, test.labels))

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        pixels, labels = batch
        smoothing = self._label_smoothing
        return F.cross_entropy(model(pixels), labels, reduction="sum", label_smoothing=smoothing), len(labels)

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, tuple[Tensor | float, int]]:
        pixels, labels = batch
        scores = model(pixels)
        found = {"accuracy": ((scores.argmax(1) == labels).sum(), len(labels))}
        if scores.shape[1] >= 2 * _TOP:  # with fewer classes, nearly anything is among the best
            best = scores.topk(_TOP).indices
            found["top5"] = ((best == labels[:, None]).sum(), len(labels))
        return {**found, "loss": (F.cross_entropy(scores, labels, reduction="sum"), len(labels))}

    def conclude(self, run: Run, model: nn.Module, config: ResnetConfig) -> None:
        """Show the first test images. All ranks ask the model: each may have only a part of it."""
        if config.data.show:
            first = Images(*(tensor[: config.data.show] for tensor in self.images.test))
            guesses = show_guesses(model, first, self.images.classes, run.world.device)
            run.log_image("guesses", guesses.picture)
            run.log_text("guesses", guesses.text)


recipe = Resnet


def _mean_and_spread(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel, from 0 to 1. From how often each byte occurs: exact, whatever the number of threads."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in pixels.unbind(1)]).double()
    chances = counts / counts.sum(1, keepdim=True)
    mean = chances @ levels
    spread = (chances @ levels.square() - mean.square()).clamp_min(0).sqrt()
    return mean.float(), spread.clamp_min(_LEAST_SPREAD).float()
