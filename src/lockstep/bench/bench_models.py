"""The models that are timed, with random data that costs almost nothing to load."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

_CLASSES = 10


class Workload(NamedTuple):
    """A model, its data and its loss."""

    make_model: Callable[[], nn.Module]  # always with the same weights
    data: TensorDataset
    loss_sum: Callable[[nn.Module, Sequence[Tensor]], tuple[Tensor, int]]


def build_workload(name: str, num_samples: int, dropout: float = 0.0) -> Workload:
    """Build a workload by name, with the same random samples each time.

    Args:
        name: tiny, mlp, mlp-9M, conv, gpt or gpt-9M.
        num_samples: the number of samples of its data.
        dropout: the probability of the model's dropout layers; 0 leaves an MLP or a conv net without any.
    """
    return _WORKLOADS[name](num_samples, dropout)


def classification(make_model: Callable[[], nn.Module], shape: Sequence[int], num_samples: int) -> Workload:
    """Build a workload of random inputs of this shape, each with a random label."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, _CLASSES, (num_samples,), generator=generator)
    inputs = torch.randn(num_samples, *shape, generator=generator)
    return Workload(make_model, TensorDataset(inputs, labels), classification_loss)


def language_modelling(make_model: Callable[[], nn.Module], vocabulary: int, length: int, num_samples: int) -> Workload:
    """Build a workload of random token sequences; the loss is next-token prediction."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, vocabulary, (num_samples, length + 1), generator=generator)
    return Workload(make_model, TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()), next_token_loss)


def classification_loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return the sum of the cross entropy, and the number of samples."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def next_token_loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return the sum of the cross entropy, and the number of tokens."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def make_mlp(inputs: int, width: int, depth: int, dropout: float = 0.0) -> nn.Module:
    """Build a perceptron with `depth` hidden layers, with the same weights each time."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(depth):
        layers += [nn.Linear(width if number else inputs, width), nn.GELU()]
    layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(width, _CLASSES))


def make_conv(dropout: float = 0.0) -> nn.Module:
    """Build a convolutional network for 3-channel images, with the same weights each time."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels, out, stride in ((3, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [nn.Conv2d(channels, out, 3, stride=stride, padding=1), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(64, _CLASSES))


class BenchGpt(nn.Module):
    """A causal transformer: pre-norm blocks, learned positions, an output layer tied to the embedding."""

    def __init__(
        self, vocabulary: int, width: int, depth: int, length: int, heads: int = 5, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, nhead=heads, dim_feedforward=4 * width, dropout=dropout, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask, persistent=False)  # not in the state dict: no weight to compare

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def make_gpt(vocabulary: int, width: int, depth: int, length: int, heads: int = 5, dropout: float = 0.0) -> nn.Module:
    """Build a `BenchGpt` with the same weights each time."""
    torch.manual_seed(0)
    return BenchGpt(vocabulary, width, depth, length, heads, dropout)


# Builders by name; each takes the number of samples and the dropout.
_WORKLOADS: dict[str, Callable[[int, float], Workload]] = {
    "tiny": lambda samples, dropout: classification(partial(make_mlp, 32, 64, 1, dropout), (32,), samples),
    "mlp": lambda samples, dropout: classification(partial(make_mlp, 64, 256, 3, dropout), (64,), samples),
    "mlp-9M": lambda samples, dropout: classification(partial(make_mlp, 256, 1500, 5, dropout), (256,), samples),
    "conv": lambda samples, dropout: classification(partial(make_conv, dropout), (3, 32, 32), samples),
    "gpt": lambda samples, dropout: language_modelling(
        partial(make_gpt, 256, 64, 2, 32, 4, dropout), vocabulary=256, length=32, num_samples=samples
    ),
    "gpt-9M": lambda samples, dropout: language_modelling(
        partial(make_gpt, 2000, 320, 7, 64, 5, dropout), vocabulary=2000, length=64, num_samples=samples
    ),
}
