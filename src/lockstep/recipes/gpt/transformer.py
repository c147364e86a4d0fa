"""The byte-level transformer, and sampling text from it."""

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

NUM_BYTES = 256  # the vocabulary

_INIT_STD = 0.02


class GptNetwork(nn.Module):
    """Pre-norm blocks over learned positions; the output layer shares its weights with the byte embedding."""

    def __init__(self, width: int, depth: int, heads: int, length: int, dropout: float) -> None:
        super().__init__()
        self.length = length  # the longest context
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads, dropout, depth) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.bytes.weight, std=_INIT_STD)
        nn.init.normal_(self.positions.weight, std=_INIT_STD)

    def forward(self, context: Tensor) -> Tensor:
        """Return logits, (batch, length, 256), for bytes, (batch, length)."""
        positions = torch.arange(context.shape[1], device=context.device)
        hidden = self.dropout(self.bytes(context.long()) + self.positions(positions))
        return F.linear(self.norm(self.blocks(hidden)), self.bytes.weight)


class TransformerBlock(nn.Module):
    """Attention and an MLP, each with a pre-norm and a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float, depth: int) -> None:
        super().__init__()
        # Each block adds twice to the residual stream, which should not grow with the number of blocks.
        residual_std = _INIT_STD / sqrt(2 * depth)
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads, residual_std)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            _linear(width, 4 * width, _INIT_STD), nn.GELU(), _linear(4 * width, width, residual_std)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.attention_norm(hidden)))
        added: Tensor = self.dropout(self.mlp(self.mlp_norm(hidden)))
        return hidden + added


class Attention(nn.Module):
    """Causal self-attention. It has no dropout, because torch's fast CPU kernel supports none."""

    def __init__(self, width: int, heads: int, residual_std: float) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = _linear(width, 3 * width, _INIT_STD)  # queries, keys and values at once
        self.output = _linear(width, width, residual_std)

    def forward(self, hidden: Tensor) -> Tensor:
        split = self.inputs(hidden).unflatten(2, (3, self.heads, -1))  # (batch, length, 3, heads, width of a head)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


def _linear(inputs: int, outputs: int, std: float) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return linear


_PROMPT = ord("\n")  # so that the sample starts at the beginning of a line


@torch.no_grad()
def sample_text(model: GptNetwork, num_bytes: int, temperature: float, generator: Generator) -> str:
    """Sample bytes one by one, and return them as text. A lower temperature favours likely bytes."""
    device = model.bytes.weight.device
    sampled = [_PROMPT]
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_bytes):
            context = torch.tensor([sampled[-model.length :]], device=device)
            scores = model(context)[0, -1].float().cpu()
            probabilities = torch.softmax(scores / temperature, dim=0)
            sampled.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    finally:
        model.train(was_training)
    return _printable(bytes(sampled[1:]))


def _printable(data: bytes) -> str:
    """Replace invalid UTF-8 and control characters by �, because a terminal would interpret control characters."""
    text = data.decode(errors="replace")
    return "".join(character if character.isprintable() or character in "\n\t" else "�" for character in text)
