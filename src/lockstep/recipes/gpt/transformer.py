"""The model: bytes in, scores for the byte that follows each of them out."""

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BYTES = 256  # different ones

_SPREAD = 0.02  # of the first weights


class Gpt(nn.Module):
    """Pre-norm blocks over learned positions; the output layer is the embedding of bytes, used backwards."""

    def __init__(self, width: int, depth: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.length = length  # of the longest context
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.apply(_draw_weights)
        for block in self.blocks:
            # Each block adds twice to the same sum, which should not grow with the number of blocks.
            for last in (block.attention.output, block.mlp[2]):
                nn.init.normal_(last.weight, std=_SPREAD / sqrt(2 * depth))

    def forward(self, context: Tensor) -> Tensor:
        """Scores of shape (batch, length, 256) for bytes of shape (batch, length)."""
        positions = torch.arange(context.shape[1], device=context.device)
        hidden = self.dropout(self.bytes(context.long()) + self.positions(positions))
        for block in self.blocks:
            hidden = block(hidden)
        return F.linear(self.norm(hidden), self.bytes.weight)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        return hidden + self.dropout(self.mlp(self.mlp_norm(hidden)))


class Attention(nn.Module):
    """Every byte looks at itself and at those before it. No dropout in here: torch's fast CPU kernel has none."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)  # queries, keys and values at once
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.inputs(hidden).unflatten(2, (3, self.heads, -1))  # batch, length, 3, heads, width of a head
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def _draw_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_SPREAD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
