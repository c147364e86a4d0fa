"""A BERT-shaped classifier of sentence pairs: token types, an attention mask, padding to a batch's longest row."""

import random

import torch
import torch.nn.functional as F
from torch import nn

import lockstep

VOCABULARY, PAD, CLS, SEP = 40, 0, 1, 2


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x, mask):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        return self.out(attended.transpose(1, 2).flatten(2))


class Bert(nn.Module):
    def __init__(self, width=32, depth=2, heads=4, labels=2):
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, width, padding_idx=PAD)
        self.position, self.kind = nn.Embedding(64, width), nn.Embedding(2, width)
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(depth)
        )
        self.dropout = nn.Dropout(0.1)
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, labels)

    def forward(self, input_ids, token_type_ids, attention_mask):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.word(input_ids) + self.kind(token_type_ids) + self.position(positions)
        for number, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = self.norms[2 * number](x + self.dropout(attention(x, attention_mask)))
            x = self.norms[2 * number + 1](x + self.dropout(mlp(x)))
        return self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))


def make_pairs(length, seed):
    """Pairs of sentences; the label says whether the second repeats the first."""
    draw = random.Random(seed)
    pairs = []
    for number in range(length):
        first = [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(2, 10))]
        second = first if number % 2 else [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(2, 10))]
        ids = [CLS, *first, SEP, *second, SEP]
        kinds = [0] * (len(first) + 2) + [1] * (len(second) + 1)
        pairs.append({"input_ids": ids, "token_type_ids": kinds, "label": number % 2})
    return pairs


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {
        key: torch.tensor([row[key] + [PAD] * (longest - len(row[key])) for row in rows])
        for key in ("input_ids", "token_type_ids")
    }
    batch["attention_mask"] = batch["input_ids"] != PAD
    return batch, torch.tensor([row["label"] for row in rows])


def loss(model, batch):
    inputs, labels = batch
    return F.cross_entropy(model(**inputs), labels, reduction="sum"), len(labels)


def accuracy(model, batch):
    inputs, labels = batch
    return {"accuracy": ((model(**inputs).argmax(1) == labels).sum(), len(labels))}


def main(world):
    run = lockstep.Run("runs/bert_classifier", world, seed=42, clip_norm=1.0)
    model = run.prepare(Bert())
    schedule = lockstep.Schedule.linear(warmup="3 steps")
    optimizer = run.optimizer(model, torch.optim.AdamW(model.parameters(), lr=2e-3), schedule)
    train = run.loader(make_pairs(100, seed=0), global_batch=16, lanes=4, collate=collate, tail="short")
    test = lockstep.EvaluationLoader(make_pairs(30, seed=1), 8, world, collate=collate)
    for step in run.steps(train, epochs=2, save_every=3):
        step.accumulate(loss, model)
        step.update(optimizer)
        if step.is_epoch_end:
            run.log(loss=step.loss, **run.evaluate(model, test, accuracy))


if __name__ == "__main__":
    lockstep.launch(main)
