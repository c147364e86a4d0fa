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
        self.blocks = nn.Sequential(*(Block(width, heads, dropout, depth) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.bytes.weight, std=_SPREAD)
        nn.init.normal_(self.positions.weight, std=_SPREAD)

    def forward(self, context: Tensor) -> Tensor:
        """Scores of shape (batch, length, 256) for bytes of shape (batch, length)."""
        positions = torch.arange(context.shape[1], device=context.device)
        hidden = self.dropout(self.bytes(context.long()) + self.positions(positions))
        return F.linear(self.norm(self.blocks(hidden)), self.bytes.weight)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, depth: int) -> None:
        super().__init__()
        # Each block adds twice to the same sum, which should not grow with the number of blocks.
        last_spread = _SPREAD / sqrt(2 * depth)
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, last_spread)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(_linear(width, 4 * width, _SPREAD), nn.GELU(), _linear(4 * width, width, last_spread))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        added: Tensor = self.dropout(self.mlp(self.mlp_norm(hidden)))
        return hidden + added


class Attention(nn.Module):
    """Every byte looks at itself and at those before it. No dropout in here: torch's fast CPU kernel has none."""

    def __init__(self, width: int, heads: int, last_spread: float) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = _linear(width, 3 * width, _SPREAD)  # queries, keys and values at once
        self.output = _linear(width, width, last_spread)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.inputs(hidden).unflatten(2, (3, self.heads, -1))  # batch, length, 3, heads, width of a head
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


def _linear(inputs: int, outputs: int, spread: float) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    nn.init.normal_(made.weight, std=spread)
    nn.init.zeros_(made.bias)
    return made
