"""LoRA: a frozen base model with small adapters in its attention; only they are trained and exported."""

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

VOCABULARY, LENGTH = 32, 16


class Base(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        x = self.embedding(ids)
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(attended.transpose(1, 2).flatten(2)))


class LoraLinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8, dropout=0.1):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.dropout, self.scale = nn.Dropout(dropout), alpha / rank
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))

    def forward(self, x):
        return self.base(x) + self.scale * (self.dropout(x) @ self.lora_a.T @ self.lora_b.T)


def add_adapters(model):
    for parameter in model.parameters():
        parameter.requires_grad = False
    for name in ("query", "value"):
        setattr(model, name, LoraLinear(getattr(model, name)))
    return model


def loss(model, batch):
    (ids,) = batch
    predicted = model(ids[:, :-1])
    return F.cross_entropy(predicted.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"), ids[:, 1:].numel()


def main(world):
    run = lockstep.Run("runs/lora", world, seed=5)
    model = run.prepare(add_adapters(Base()))
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = run.optimizer(model, torch.optim.AdamW(adapters, lr=1e-2))
    start = torch.randint(VOCABULARY, (80, 1), generator=torch.Generator().manual_seed(3))
    data = TensorDataset((start + 3 * torch.arange(LENGTH)) % VOCABULARY)
    for step in run.steps(run.loader(data, global_batch=20, lanes=4), steps=10, save_every=3):
        step.accumulate(loss, model)
        step.update(optimizer)
    if world.is_main:
        weights = {name: tensor for name, tensor in model.state_dict().items() if "lora_" in name}
        torch.save(weights, Path("runs/lora/adapters.pt"))
        print(f"{len(weights)} adapters, {sum(tensor.numel() for tensor in weights.values()):,} weights")


if __name__ == "__main__":
    lockstep.launch(main)
