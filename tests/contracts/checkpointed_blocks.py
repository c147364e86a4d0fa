"""Blocks that draw from every random stream and change buffers, trained with activation checkpointing and without."""

import random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from lockstep.engine.state_digest import tensor_digests
from lockstep.train.activation_checkpointing import checkpoint_activations
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.contracts.workloads import GPT, Trained, cross_entropy

WIDTH = 24


RULES = {"*.seen": "mean"}


class Passed(NamedTuple):
    hidden: Tensor
    parts: dict[str, tuple[Tensor, int]]


class Block(nn.Module):
    """Draws from every stream, has batch norm and a buffer that it changes; takes keywords, returns a nest."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.slow_norm = nn.BatchNorm1d(WIDTH, momentum=None)  # reads its counter
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.tensor(0))
        self.calls: Tensor

    def forward(self, passed: Passed, *, scale: Tensor, shift: float) -> Passed:
        kept = passed.hidden + passed.parts["kept"][0]
        hidden = self.slow_norm(self.first(self.norm(kept))) - self.seen
        with torch.no_grad():
            self.seen.lerp_(hidden.mean(0), 0.1)
            self.calls += 1
        noise = torch.rand(WIDTH, device=hidden.device) + torch.rand(()).item()
        noise += float(np.random.randn()) + random.gauss(0, 1)
        hidden = self.dropout(torch.tanh(hidden * scale + shift * noise))
        return Passed(passed.hidden + self.second(hidden).float(), {"kept": (hidden.square().float(), 1)})


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        passed = Passed(inputs, {"kept": (torch.zeros_like(inputs), 0)})
        for block in self.blocks:
            passed = block(passed, scale=self.scale, shift=0.1)
        scores: Tensor = self.head(passed.hidden + passed.parts["kept"][0])
        return scores + torch.rand(5, device=scores.device)  # after the blocks' draws


def train_blocks(world: World, lanes: int, **options: Any) -> Trained:
    torch.set_num_threads(1)
    run = Run(None, world, seed=3, buffers=RULES, **options)
    model = run.prepare(Blocks())
    optimizer = run.optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-2))
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(120, WIDTH, generator=generator), torch.arange(120) % 5)
    losses = []
    for step in run.steps(run.loader(data, 40, lanes=lanes), steps=4, finish=False):
        for inputs, labels in step.lanes:
            # The second forward pass continues the random streams, although a backward pass comes between.
            step.backward(*cross_entropy(model, (inputs, labels)), more=True)
            step.backward(cross_entropy(model, (-inputs, labels))[0], 0)
        step.update(optimizer)
        losses.append(step.loss)
    return Trained(run.digest(), tensor_digests(run.state()), losses)


def sharded_gradients(world: World) -> list[list[Tensor]]:
    """Return the gradients under FSDP2 without checkpointing, with it, and with it applied after the sharding."""
    torch.set_num_threads(1)
    found = []
    for when in ("never", "before", "after"):
        torch.manual_seed(0)
        model = GPT().to(world.device)
        if when == "before":
            checkpoint_activations(model)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        if when == "after":
            assert checkpoint_activations(model, classes=["TransformerEncoderLayer"]) == checkpoint_activations(model)
            assert all("forward" in block.__dict__ for block in model.blocks)
        torch.manual_seed(1 + world.rank)
        for _ in range(2):  # the second adds to the gradients of the first
            model(torch.randint(0, 50, (4, 12), device=world.device)).square().sum().backward()
        found.append([p.grad.full_tensor().cpu() for p in model.parameters()])  # type: ignore[union-attr]
    return found
