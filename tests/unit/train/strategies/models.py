"""A model whose parts have different sizes, to be cut into FSDP units and sharded by a tensor plan."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(10, 100), nn.Linear(100, 2)
        self.norm = nn.LayerNorm(2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.norm(self.narrow(self.wide(inputs)))
        return scores


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.attention = nn.MultiheadAttention(10, 2)
        self.tokens, self.head = nn.Embedding(50, 10), nn.Linear(10, 50, bias=False)
        self.head.weight = self.tokens.weight
        self.places = nn.Embedding(50, 10)
