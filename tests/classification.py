"""Random samples of three classes, and the loss of a classifier, for tests of training."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

DATA = TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3)


def loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)
