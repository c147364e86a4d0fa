"""A model with attention blocks, and the gradients of a model."""

import weakref

from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed: Tensor = self.output(self.inputs(hidden).tanh())
        return mixed


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(), nn.LayerNorm(8), nn.Linear(8, 8)
        self.calls = 0
        self.kept: weakref.ref[Tensor] | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        mixed = self.attention(self.norm(hidden))
        self.kept = weakref.ref(mixed)
        return hidden + self.mlp(mixed).relu()


class Encoder(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(depth)))
        self.norm = nn.LayerNorm(8)

    def forward(self, hidden: Tensor) -> Tensor:
        encoded: Tensor = self.norm(self.blocks(hidden))
        return encoded


class Towers(nn.Module):
    """Two encoders with blocks of the same class, and other modules, some of which occur more often than the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Encoder(2), Encoder(3)
        self.extra = nn.ModuleList([Attention() for _ in range(2)])
        self.head = nn.Linear(8, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.head(self.left(hidden) + self.right(hidden))
        return scores


def make_model() -> nn.Module:
    return Towers()


def gradients_of(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
