"""A language model on a stream of text lines: shuffled in a buffer, packed into blocks, read by a worker."""

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lockstep

BLOCK, BUFFER = 24, 16


def write_corpus(folder):
    draw = random.Random(0)
    words = ["red", "green", "blue", "one", "two", "three", "up", "down", "left", "right"]
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(3):
        lines = (" ".join(draw.choices(words, k=draw.randint(3, 12))) for _ in range(60))
        (folder / f"part-{part}.txt").write_text("\n".join(lines))


class Lines(IterableDataset):
    """Every line of every file, in a new order in each epoch, as blocks of bytes."""

    def __init__(self, folder):
        self.paths = sorted(folder.glob("*.txt"))
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def lines(self):
        paths = list(self.paths)
        random.Random(self.epoch).shuffle(paths)
        for path in paths:
            with path.open() as file:
                yield from file

    def shuffled(self):
        buffer = []
        for line in self.lines():
            buffer.append(line)
            if len(buffer) == BUFFER:
                yield buffer.pop(random.randrange(BUFFER))
        random.shuffle(buffer)
        yield from buffer

    def __iter__(self):
        waiting = []
        for line in self.shuffled():
            waiting += line.encode()
            while len(waiting) > BLOCK:
                block, waiting = torch.tensor(waiting[: BLOCK + 1]), waiting[BLOCK:]
                yield block[:-1], block[1:]


class Recurrent(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embedding, self.gru, self.head = nn.Embedding(128, width), nn.GRU(width, width), nn.Linear(width, 128)

    def forward(self, ids):
        return self.head(self.gru(self.embedding(ids).transpose(0, 1))[0].transpose(0, 1))


def loss(model, batch):
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def main(world):
    corpus = Path("corpus")
    if world.is_main:
        write_corpus(corpus)
    lockstep.barrier()
    run = lockstep.Run("runs/text_stream", world, seed=9, clip_norm=1.0)
    model = run.prepare(Recurrent())
    schedule = lockstep.Schedule.cosine(warmup="2 steps", length="12 steps")
    optimizer = run.optimizer(model, torch.optim.AdamW(model.parameters(), lr=5e-3), schedule)
    train = run.loader(DataLoader(Lines(corpus), batch_size=32, num_workers=1, drop_last=True), lanes=4)
    for step in run.steps(train, steps=12, save_every=3):
        step.accumulate(loss, model)
        step.update(optimizer)
        run.log(loss=step.loss, epoch=step.epoch)


if __name__ == "__main__":
    lockstep.launch(main)
