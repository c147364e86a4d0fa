"""The models that are timed, with data that costs nothing to load. The built-in ones have dropout."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

_CLASSES = 10
_VOCABULARY, _LENGTH = 256, 32
_DROPOUT = 0.1


class Workload(NamedTuple):
    make_model: Callable[[], nn.Module]  # always with the same weights
    data: TensorDataset
    loss_sum: Callable[[nn.Module, Sequence[Tensor]], tuple[Tensor, int]]


def workload(name: str, num_samples: int) -> Workload:
    """A built-in one, with so many samples: random numbers, the same ones each time."""
    return _BUILT_IN[name](num_samples)


def classified(make_model: Callable[[], nn.Module], shape: Sequence[int], num_samples: int) -> Workload:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, _CLASSES, (num_samples,), generator=generator)
    inputs = torch.randn(num_samples, *shape, generator=generator)
    return Workload(make_model, TensorDataset(inputs, labels), classify)


def predicted(make_model: Callable[[], nn.Module], vocabulary: int, length: int, num_samples: int) -> Workload:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, vocabulary, (num_samples, length + 1), generator=generator)
    return Workload(make_model, TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()), predict)


def classify(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def predict(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def make_mlp(inputs: int, width: int, depth: int, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(depth):
        layers += [nn.Linear(width if number else inputs, width), nn.GELU()]
    layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(width, _CLASSES))


def make_conv(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels, out, stride in ((3, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [nn.Conv2d(channels, out, 3, stride=stride, padding=1), nn.ReLU()]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    layers += [nn.Dropout(dropout)] if dropout else []
    return nn.Sequential(*layers, nn.Linear(64, _CLASSES))


class GPT(nn.Module):
    """Pre-norm blocks, learned positions, an output layer tied to the embedding."""

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
        self.register_buffer("mask", mask, persistent=False)  # no weight: it is not compared

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def make_gpt(vocabulary: int, width: int, depth: int, length: int, heads: int = 5, dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocabulary, width, depth, length, heads, dropout)


_BUILT_IN: dict[str, Callable[[int], Workload]] = {
    "mlp": partial(classified, partial(make_mlp, 64, 256, 3, _DROPOUT), (64,)),
    "tiny": partial(classified, partial(make_mlp, 32, 64, 1, _DROPOUT), (32,)),
    "conv": partial(classified, partial(make_conv, _DROPOUT), (3, 32, 32)),
    "gpt": partial(predicted, partial(make_gpt, _VOCABULARY, 64, 2, _LENGTH, 4, _DROPOUT), _VOCABULARY, _LENGTH),
}
