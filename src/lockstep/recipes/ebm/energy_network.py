"""The classifier network, whose logits also define an unnormalized density of images.

With logits f(x), one per class, log p(x) = logsumexp f(x) + a constant; the energy of an image is the negative of that.
There is no batch norm: an attack on one image must not depend on the others, nor change running statistics. Activations
are smooth, because attacks and the R1 penalty use gradients with respect to the image.
"""

import torch.nn.functional as F
from torch import Tensor, nn

_MIN_SIZE = 4  # pixels: feature maps are halved down to this


class Classifier(nn.Module):
    """Residual blocks at full size; then the size is halved and the width doubled, down to the smallest size."""

    def __init__(self, channels: int, size: int, num_classes: int, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1)
        stages: list[nn.Module] = [_blocks(width, depth)]
        while size >= 2 * _MIN_SIZE:
            stages += [nn.AvgPool2d(2), nn.Conv2d(width, 2 * width, 1), _blocks(2 * width, depth)]
            size, width = size // 2, 2 * width
        self.stages = nn.Sequential(*stages)
        self.scores = nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return a logit per class, for images of shape (batch, channels, height, width) with values from 0 to 1."""
        features: Tensor = self.stages(self.stem(2 * images - 1))
        # Not an adaptive pooling layer: its backward pass on a GPU is not deterministic.
        scores: Tensor = self.scores(F.silu(features).mean((2, 3)))
        return scores


class EnergyBlock(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        # Starts as the identity: in place of a norm, this keeps activations bounded through many blocks.
        for parameter in self.second.parameters():
            nn.init.zeros_(parameter)

    def forward(self, features: Tensor) -> Tensor:
        added: Tensor = self.second(F.silu(self.first(F.silu(features))))
        return features + added


def log_density(scores: Tensor) -> Tensor:
    """Return the negative energy of each image, from its logits."""
    return scores.logsumexp(1)


def _blocks(width: int, depth: int) -> nn.Sequential:
    return nn.Sequential(*(EnergyBlock(width) for _ in range(depth)))
