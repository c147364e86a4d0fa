"""A small GPT on characters: warm-up and cosine decay, gradient clipping, and accumulation over the lanes."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import lockstep

TEXT = "the quick brown fox jumps over the lazy dog. pack my box with five dozen liquor jugs. " * 20
CONTEXT = 32


class Characters(Dataset):
    def __init__(self, text):
        self.vocabulary = sorted(set(text))
        self.ids = torch.tensor([self.vocabulary.index(character) for character in text])

    def __len__(self):
        return len(self.ids) - CONTEXT - 1

    def __getitem__(self, start):
        piece = self.ids[start : start + CONTEXT + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self, vocabulary, width=32, depth=2, heads=4):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, ids):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


def loss(model, batch):
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def main(world):
    run = lockstep.Run("runs/char_gpt", world, seed=1337, clip_norm=1.0)
    data = Characters(TEXT)
    model = run.prepare(Gpt(len(data.vocabulary)))
    decay = [p for p in model.parameters() if p.dim() >= 2]
    no_decay = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    schedule = lockstep.Schedule.cosine(warmup="3 steps")
    optimizer = run.optimizer(model, optimizer, schedule)
    train = run.loader(data, global_batch=24, lanes=8)  # 8 micro-batches of 3, on any number of processes
    for step in run.steps(train, steps=12, save_every=3):
        step.accumulate(loss, model)
        step.update(optimizer)
        run.log(loss=step.loss, lr=optimizer.param_groups[0]["lr"])


if __name__ == "__main__":
    lockstep.launch(main)
