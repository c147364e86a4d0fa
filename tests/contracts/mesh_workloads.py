"""Small models in double precision, trained with every option of a run, whose results a mesh must not change."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.errors import Stopped
from lockstep.metrics import ConfusionMatrix
from lockstep.train.run import Run
from lockstep.train.step import Step
from lockstep.world.dtensor import local_tensor
from lockstep.world.keyed_random import keyed_generator
from lockstep.world.world import World

Advance = Callable[[Step], None]

PLAN = {"blocks.*.[qkv]": "column", "blocks.*.out": "row", "*.up": "column", "*.down": "row"}
SEQUENCE_PLAN = {
    "tokens": "row_to_sequence",
    "*.norm[12]": "sequence",
    "blocks.*.[qkv]": "column_from_sequence",
    "blocks.*.out": "row_to_sequence",
    "*.up": "column_from_sequence",
    "*.down": "row_to_sequence",
    "norm": "sequence_gathered",
    "head": "column_gathered",
}


class Block(nn.Module):
    """Derives the number of heads from the features: a rank with half the features has half the heads."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm1(hidden)
        q, k, v = (f(normed).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        result: Tensor = hidden + self.down(F.gelu(self.up(self.norm2(hidden))))
        return result


class GPT(nn.Module):
    def __init__(self, *, tied: bool, vocabulary: int = 22, width: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, head=3) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def next_token(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    (text,) = batch
    logits = model(text[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, text[:, 1:].flatten(), reduction="sum"), text[:, 1:].numel()


def text(name: str, count: int) -> TensorDataset:
    return TensorDataset(torch.randint(0, 22, (count, 9), generator=keyed_generator(0, "text", name)))


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]
    metrics: list[dict[str, Any]]  # of the weights, then of their average
    state: dict[str, Tensor]
    began_with: str  # the digest before the first step of this attempt
    digest: str
    num_bytes: tuple[int, int]  # of the weights here, and of the optimizer's state here


def train_gpt(
    world: World,
    folder: Path | None = None,
    stop: int | None = None,
    *,
    steps: int = 4,
    tied: bool = True,
    **options: Any,
) -> Trained:
    """Train with clipping, average, evaluation, parameter groups, and an optimizer made before `run.prepare`."""
    torch.set_num_threads(1)
    run = Run(folder, world, sinks=[], **{"seed": 5, "determinism": "fast", "clip_norm": 0.3} | options)
    run.stop_after = stop
    model = GPT(tied=tied).double()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() <= 1]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    model = run.prepare(model)
    run.optimizer(model, optimizer, lambda step: 1.0 / (1 + step))
    average = run.ema(model, 0.5)
    losses, norms, began_with = [], [], ""
    try:
        for step in run.steps(run.loader(text("train", 96), 24, lanes=8), steps=steps, finish=False):
            began_with = began_with or run.digest()
            step.accumulate(next_token, model)
            with torch.no_grad():  # what this gathers is out of date after the update
                next_token(model, step.batch.lanes[0].data)
            step.update(optimizer)
            losses.append(step.loss)
            norms.append(float(step.grad_norm))
    except Stopped:
        run.close()
    metrics = [evaluated(run, model)]
    with average.applied():
        metrics.append(evaluated(run, model))
    metrics.append(evaluated(run, model))
    here = run._state.strategy.optimizer_here(optimizer)
    num_bytes = (
        sum(local_tensor(p).nbytes for p in model.parameters()),
        sum(value.nbytes for state in here.state.values() for value in state.values()),
    )
    state = {name: tensor.clone() for name, tensor in run.state().items()}
    return Trained(losses, norms, metrics, state, began_with, run.digest() if stop else run.finish(), num_bytes)


def evaluated(run: Run, model: nn.Module) -> dict[str, Any]:
    """Evaluate 37 samples in 5 chunks of 8, the last one smaller: 2 or 4 ranks get different numbers of chunks."""

    def metrics(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, Any]:
        loss, count = next_token(model, batch)
        lengths = torch.full((len(batch[0]),), batch[0].shape[1])
        samples = ConfusionMatrix(lengths, lengths, num_classes=10)  # whose counts are added up
        return {"loss": (loss, count), "samples": samples}

    return run.evaluate(model, text("test", 37), metrics, batch=8)


def train_small(world: World, name: str, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    torch.set_num_threads(1)
    run = Run(None, world, **{"seed": 5, "determinism": "fast"} | options)
    data, advance = SMALL[name](run)
    losses = []
    for step in run.steps(run.loader(data, 32, lanes=8), steps=3, finish=False):
        advance(step)
        losses.append(step.loss)
    state = {key: tensor.clone() for key, tensor in run.state().items()}
    run.finish()
    return losses, state


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=keyed_generator(0, "noise", str(shape)))


def classify(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1])


def _classifier(run: Run, model: nn.Module, *shape: int) -> tuple[TensorDataset, Advance]:
    model = run.prepare(model.double())
    # With a state from the beginning, made of whole parameters where it was made before.
    optimizer = run.optimizer(model, lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1))

    def advance(step: Step) -> None:
        step.accumulate(classify, model)
        step.update(optimizer)

    return TensorDataset(_noise(96, *shape), torch.arange(96) % 5), advance


def mlp(run: Run) -> tuple[TensorDataset, Advance]:
    """The layer has 3 rows, so a fourth rank has none."""
    return _classifier(run, nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 33), nn.Tanh(), nn.Linear(33, 5)), 7)


def conv(run: Run) -> tuple[TensorDataset, Advance]:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(72, 5)]
    return _classifier(run, nn.Sequential(*layers), 3, 5, 5)


def gan(run: Run) -> tuple[TensorDataset, Advance]:
    """Each model's pass goes through the other one, whose gradients it must not change."""
    generator = run.prepare(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6)).double())
    critic = run.prepare(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double())
    of_generator = run.optimizer(generator, lambda params: torch.optim.Adam(params, lr=1e-2))
    of_critic = run.optimizer(critic, lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9))

    def fake(real: Tensor) -> Tensor:
        made: Tensor = generator(torch.randn(len(real), 4, dtype=real.dtype, device=real.device))
        return made

    def critic_loss(critic: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        return (F.softplus(-critic(batch[0])) + F.softplus(critic(fake(batch[0])))).sum(), len(batch[0])

    def generator_loss(_generator: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
        return F.softplus(-critic(fake(batch[0]))).sum(), len(batch[0])

    def advance(step: Step) -> None:
        step.accumulate(critic_loss, critic)
        step.accumulate(generator_loss, generator)
        step.update(of_critic)
        step.update(of_generator)

    return TensorDataset(_noise(96, 6)), advance


def several(run: Run) -> tuple[TensorDataset, Advance]:
    """Two terms, each with its own count, in several lanes per rank."""
    model = run.prepare(nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 5)).double())
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=1e-1, momentum=0.9))

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, tuple[Tensor, int]]:
        scores, labels = model(batch[0]), batch[1]
        entropy = F.cross_entropy(scores, labels, reduction="sum")
        return {"entropy": (entropy, len(labels)), "size": (scores[labels < 2].square().sum(), int((labels < 2).sum()))}

    def advance(step: Step) -> None:
        step.accumulate(loss, model)
        step.update(optimizer)

    return TensorDataset(_noise(96, 7), torch.arange(96) % 5), advance


def twice(run: Run) -> tuple[TensorDataset, Advance]:
    """Two backward passes in every lane, in a custom loop."""
    model = run.prepare(nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 5)).double())
    optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=1e-1))

    def advance(step: Step) -> None:
        for inputs, labels in step.lanes:
            step.backward(F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels), more=True)
            step.backward(0.1 * model(-inputs).square().sum(), 0)
        step.update(optimizer)

    return TensorDataset(_noise(96, 7), torch.arange(96) % 5), advance


SMALL: dict[str, Callable[[Run], tuple[TensorDataset, Advance]]] = {
    each.__name__: each for each in (mlp, conv, gan, several, twice)
}
