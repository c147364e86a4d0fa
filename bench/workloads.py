"""The models that are timed, with data that costs nothing to load."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset


class Workload(NamedTuple):
    make_model: Callable[[], nn.Module]
    data: TensorDataset
    loss_sum: Callable[[nn.Module, Sequence[Tensor]], tuple[Tensor, int]]


def classify(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels)


def predict(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def mlp(inputs: int, width: int, depth: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for number in range(depth):
            layers += [nn.Linear(width if number else inputs, width), nn.GELU()]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    return make


class GPT(nn.Module):
    """Pre-norm blocks, learned positions, an output layer tied to the embedding; no dropout."""

    def __init__(self, vocabulary: int, width: int, depth: int, length: int, heads: int = 5) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, nhead=heads, dim_feedforward=4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def make_gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(vocabulary=2000, width=320, depth=7, length=64)


def small_conv() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def workload(name: str, samples: int) -> Workload:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    if name == "tiny":
        return Workload(mlp(32, 64, 1), TensorDataset(torch.randn(samples, 32, generator=generator), labels), classify)
    if name == "mlp-0.15M":
        return Workload(mlp(64, 256, 3), TensorDataset(torch.randn(samples, 64, generator=generator), labels), classify)
    if name == "mlp-9M":
        inputs = torch.randn(samples, 256, generator=generator)
        return Workload(mlp(256, 1500, 5), TensorDataset(inputs, labels), classify)
    if name == "conv":
        inputs = torch.randn(samples, 3, 32, 32, generator=generator)
        return Workload(small_conv, TensorDataset(inputs, labels), classify)
    text = torch.randint(0, 2000, (samples, 65), generator=generator)
    return Workload(make_gpt, TensorDataset(text[:, :-1].contiguous(), text[:, 1:].contiguous()), predict)
