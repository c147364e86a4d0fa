"""A Hugging Face model in your own training loop: a tiny GPT-2, made from its config, on paragraphs of Python's manual.

    python examples/transformers_gpt2.py
    lockstep run -n 2 examples/transformers_gpt2.py --steps 100
    torchrun --nproc-per-node 2 examples/transformers_gpt2.py

Needs `pip install transformers`; nothing is downloaded. Paragraphs differ in length, so averaging the mean losses that
`model(..., labels=...)` returns would weight some bytes more than others: the loss here returns a sum and a count.
The last line is a digest: the same on any number of processes, dropout included.
"""

import argparse
from math import log
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

import lockstep

LENGTH = 64  # bytes used of each paragraph
NO_TARGET = -100  # the target after the end of a shorter paragraph


def make_model() -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config)


def load_paragraphs() -> tuple[TensorDataset, TensorDataset]:
    """Return paragraphs as bytes, padded with zeros, and the next bytes as targets; every tenth is held out."""
    texts = [part.strip().encode() for name in sorted(topics) for part in topics[name].split("\n\n") if part.strip()]
    padded = [text[: LENGTH + 1] + bytes(max(0, LENGTH + 1 - len(text))) for text in texts]
    rows = torch.tensor([list(row) for row in padded])
    targets = rows[:, 1:].masked_fill(rows[:, 1:] == 0, NO_TARGET)
    is_test = torch.arange(len(rows)) % 10 == 0
    splits = [TensorDataset(rows[chosen, :-1], targets[chosen]) for chosen in (~is_test, is_test)]
    return splits[0], splits[1]


def loss(model: nn.Module, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sum over the lane's bytes and their number, so that uneven lanes are weighted correctly."""
    rows, targets = batch
    # The padding comes after the text, and attention is causal: no attention mask is needed.
    scores = model(input_ids=rows, use_cache=False).logits
    summed = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET, reduction="sum")
    return summed, (targets != NO_TARGET).sum()


def bits_per_byte(model: nn.Module, batch: list[Tensor]) -> dict[str, tuple[Tensor, int]]:
    summed, num_bytes = loss(model, batch)
    return {"bits_per_byte": (summed / log(2), int(num_bytes))}


def main(world: lockstep.World) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()

    run = lockstep.Run("runs/transformers_gpt2", world, seed=0, clip_norm=1.0)
    model = run.prepare(make_model())  # the same module, with its own methods
    schedule = lockstep.Schedule.cosine(warmup=20)
    optimizer = run.optimizer(model, torch.optim.AdamW(model.parameters(), lr=3e-3), schedule)
    train_set, test_set = load_paragraphs()
    loader = run.loader(train_set, global_batch=32, lanes=8)
    for step in run.steps(loader, steps=args.steps):
        step.accumulate(loss, model)
        step.update(optimizer)
        if step.every(100) or step.number == args.steps:
            run.log(loss=step.loss, **run.evaluate(model, test_set, bits_per_byte))
    if world.is_main:
        model.save_pretrained("runs/transformers_gpt2/model")  # for GPT2LMHeadModel.from_pretrained


if __name__ == "__main__":
    lockstep.launch(main)
