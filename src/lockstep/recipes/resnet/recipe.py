"""The resnet recipe: `lockstep train resnet`, or `lockstep train resnet data.path=FOLDER model.variant=cifar18`."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.recipes.images.image_grid import log_guesses
from lockstep.recipes.images.image_source import load_images
from lockstep.recipes.images.image_splits import Augmented, ImageSplits
from lockstep.recipes.resnet import ResnetConfig
from lockstep.recipes.resnet.resnet_network import VARIANTS, ResNet
from lockstep.train.recipe import Splits
from lockstep.train.run import Run

_TOP = 5  # guesses that count for top5
_MIN_STD = 1e-3  # used for a constant channel


class ResnetRecipe:
    """An image classifier; the config chooses the variant."""

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
        mean, std = _mean_and_std(self.images.train.pixels)
        return ResNet(variant, len(self.images.classes), mean, std, config.data.image_size)

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
        if scores.shape[1] >= 2 * _TOP:  # with fewer classes, top 5 means little
            best = scores.topk(_TOP).indices
            found["top5"] = ((best == labels[:, None]).sum(), len(labels))
        return {**found, "loss": (F.cross_entropy(scores, labels, reduction="sum"), len(labels))}

    def conclude(self, run: Run, model: nn.Module, config: ResnetConfig) -> None:
        log_guesses(run, model, self.images, config.data.show)


recipe = ResnetRecipe


def _mean_and_std(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Per channel, on a scale from 0 to 1. Computed from counts of byte values, so exact with any number of threads."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in pixels.unbind(1)]).double()
    probabilities = counts / counts.sum(1, keepdim=True)
    mean = probabilities @ levels
    std = (probabilities @ levels.square() - mean.square()).clamp_min(0).sqrt()
    return mean.float(), std.clamp_min(_MIN_STD).float()
