"""The network: a small residual classifier, whose scores are also an unnormalised density of images.

With scores f(x), one for each class, log p(x) = logsumexp f(x) + a constant. The energy of an image is the negative of
that. There is no batch norm: an attack on one image must not depend on the others, nor change what the network keeps.
Activations are smooth, because attacks and the R1 penalty go by gradients with respect to the image.
"""

import torch.nn.functional as F
from torch import Tensor, nn

_SMALLEST = 4  # pixels: images are halved down to this


class Classifier(nn.Module):
    """Residual blocks at full size, then the image is halved and the width doubled, until little of it is left."""

    def __init__(self, channels: int, size: int, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        stages: list[nn.Module] = [_blocks(width, depth)]
        while size >= 2 * _SMALLEST:
            stages += [nn.AvgPool2d(2), nn.Conv2d(width, 2 * width, 1), _blocks(2 * width, depth)]
            size, width = size // 2, 2 * width
        self.stages = nn.Sequential(*stages)
        self.scores = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """A score for each class, for images of shape (batch, channels, height, width) and values from 0 to 1."""
        features: Tensor = self.stages(self.stem(2 * images - 1))
        # Not an adaptive pooling layer: its backward pass on a GPU has no fixed order.
        scores: Tensor = self.scores(F.silu(features).mean((2, 3)))
        return scores


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        # Begins as if it were not there: in place of a norm, this keeps what goes through many blocks in bounds.
        for parameter in self.second.parameters():
            nn.init.zeros_(parameter)

    def forward(self, features: Tensor) -> Tensor:
        added: Tensor = self.second(F.silu(self.first(F.silu(features))))
        return features + added


def log_density(scores: Tensor) -> Tensor:
    """The negative energy of each image, from its scores."""
    return scores.logsumexp(1)


def _blocks(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(Block(width) for _ in range(depth)))
