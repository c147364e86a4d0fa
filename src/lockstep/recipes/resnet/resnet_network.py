"""Residual networks (He et al., 2015), in the two shapes of that paper.

For large images: a stem that downsamples by four, then four stages. For small images: a stem that keeps the size, then
three or four stages. Each stage but the first halves the size and doubles the channels. As is usual today, a bottleneck
downsamples in its 3 × 3 layer, a shortcut that changes the shape is a 1 × 1 layer, and blocks start as the identity.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Variant(NamedTuple):
    """The size of a network."""

    depths: tuple[int, ...]  # blocks per stage
    width: int  # channels of the first stage
    is_deep: bool = False  # bottlenecks, with four times as many channels outside
    is_small: bool = False  # for small images


VARIANTS = {
    "cifar18": Variant((2, 2, 2, 2), 64, is_small=True),
    "cifar20": Variant((3, 3, 3), 16, is_small=True),
    "cifar32": Variant((5, 5, 5), 16, is_small=True),
    "cifar56": Variant((9, 9, 9), 16, is_small=True),
    "resnet18": Variant((2, 2, 2, 2), 64),
    "resnet34": Variant((3, 4, 6, 3), 64),
    "resnet50": Variant((3, 4, 6, 3), 64, is_deep=True),
    "resnet101": Variant((3, 4, 23, 3), 64, is_deep=True),
}


class ResNet(nn.Module):
    """Takes bytes of shape (images, channels, height, width), and returns a logit per class.

    Channels are normalized with the mean and standard deviation of the training images, and images are resized to
    `image_size` pixels per side if that is given.
    """

    mean: Tensor
    spread: Tensor

    def __init__(
        self,
        variant: Variant,
        num_classes: int,
        mean: Tensor,
        spread: Tensor,
        image_size: int | None = None,
    ) -> None:
        super().__init__()
        self.image_size = image_size
        self.register_buffer("mean", mean.view(1, -1, 1, 1))
        self.register_buffer("spread", spread.view(1, -1, 1, 1))
        self.stem = _stem(mean.numel(), variant)
        blocks: list[nn.Module] = []
        channels = variant.width
        for stage, depth in enumerate(variant.depths):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                made = ResNetBlock(channels, variant.width * 2**stage, stride, variant.is_deep)
                channels = made.channels
                blocks.append(made)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        images = (pixels.float() / 255 - self.mean) / self.spread
        if self.image_size is not None:
            images = F.interpolate(images, size=(self.image_size, self.image_size), mode="bilinear")
        # The memory format that convolutions on GPUs are fastest with.
        images = images.contiguous(memory_format=torch.channels_last)
        features = self.blocks(self.stem(images)).mean((2, 3))
        scores: Tensor = self.head(features)
        return scores


class ResNetBlock(nn.Module):
    """Two 3 × 3 layers, or a 3 × 3 between two 1 × 1 layers (a bottleneck), with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, is_deep: bool) -> None:
        super().__init__()
        self.channels = 4 * width if is_deep else width  # of the output
        if is_deep:
            self.body = nn.Sequential(
                ConvNormLayer(inputs, width, 1),
                nn.ReLU(),
                ConvNormLayer(width, width, 3, stride),
                nn.ReLU(),
                ConvNormLayer(width, 4 * width, 1),
            )
        else:
            self.body = nn.Sequential(
                ConvNormLayer(inputs, width, 3, stride), nn.ReLU(), ConvNormLayer(width, width, 3)
            )
        last = self.body[-1]
        assert isinstance(last, ConvNormLayer)
        nn.init.zeros_(last.norm.weight)
        keeps_shape = stride == 1 and inputs == self.channels
        self.shortcut = nn.Identity() if keeps_shape else ConvNormLayer(inputs, self.channels, 1, stride)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.body(inputs) + self.shortcut(inputs))


class ConvNormLayer(nn.Module):
    """A convolution and a batch norm."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.norm(self.conv(inputs))
        return outputs


def _stem(channels: int, variant: Variant) -> nn.Sequential:
    if variant.is_small:
        return nn.Sequential(ConvNormLayer(channels, variant.width, 3), nn.ReLU())
    return nn.Sequential(ConvNormLayer(channels, variant.width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
