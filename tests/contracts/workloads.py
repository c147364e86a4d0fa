"""Small models of many kinds, each with its data and its step, on which every promise about bits is checked."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.engine.state_digest import tensor_digests
from lockstep.errors import Stopped
from lockstep.train.run import Run
from lockstep.train.step import Step
from lockstep.world.keyed_random import keyed_generator
from lockstep.world.world import World
from tests.classification import loss as cross_entropy

Advance = Callable[[Step], None]


class Workload(NamedTuple):
    data: TensorDataset
    start: Callable[[Run], Advance]  # prepares models and optimizers; what it returns makes one step


class Trained(NamedTuple):
    digest: str
    tensors: dict[str, str]  # each tensor's digest
    losses: list[float]


def train(
    world: World,
    name: str,
    steps: int,
    loader: dict[str, Any],
    folder: Path | None = None,
    stop_after: int | None = None,
    **options: Any,
) -> Trained:
    """Train one of the workloads. `loader` and `options` go to `run.loader` and to `Run`."""
    torch.set_num_threads(1)
    run = Run(folder, world, seed=11, sinks=[], **options)
    run.stop_after = stop_after
    workload = WORKLOADS[name]()
    advance = workload.start(run)
    losses = []
    try:
        for step in run.steps(run.loader(workload.data, **loader), steps=steps, finish=False):
            advance(step)
            losses.append(step.loss)
    except Stopped:
        run.close()
    tensors = tensor_digests(run.state())
    return Trained(run.digest() if stop_after else run.finish(), tensors, losses)


def _noise(name: str, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=keyed_generator(0, "workload", name))


def _labels(name: str, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=keyed_generator(0, "labels", name))


def _classifier(make_model: Callable[[], nn.Module], data: TensorDataset) -> Workload:
    def start(run: Run) -> Advance:
        model = run.prepare(make_model())
        optimizer = run.optimizer(model, lambda params: torch.optim.AdamW(params, lr=1e-2))

        def advance(step: Step) -> None:
            step.accumulate(cross_entropy, model)
            step.update(optimizer)

        return advance

    return Workload(data, start)


def mlp() -> Workload:
    model = lambda: nn.Sequential(nn.Linear(20, 64), nn.GELU(), nn.Linear(64, 67), nn.GELU(), nn.Linear(67, 10))  # noqa: E731
    return _classifier(model, TensorDataset(_noise("mlp", 150, 20), _labels("mlp", 10, 150)))


def conv() -> Workload:
    """Batch norm and dropout."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(16 * 4 * 4, 10),
        )

    return _classifier(model, TensorDataset(_noise("conv", 150, 3, 9, 9), _labels("conv", 10, 150)))


class GPT(nn.Module):
    """Two pre-norm blocks with dropout; the output layer is tied to the token embedding."""

    def __init__(self, vocabulary: int = 50, width: int = 32, length: int = 12) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        block = lambda: nn.TransformerEncoderLayer(  # noqa: E731
            width, nhead=4, dim_feedforward=64, dropout=0.1, batch_first=True, norm_first=True
        )
        self.blocks = nn.ModuleList([block(), block()])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def gpt() -> Workload:
    """Tied embeddings, dropout, ignored targets; the first rows of the data have no valid target at all."""
    text = _labels("gpt", 50, 150, 13)
    inputs, targets = text[:, :-1].contiguous(), text[:, 1:].clone()
    lengths = _labels("lengths", 13, 150)
    targets[torch.arange(12)[None] >= lengths[:, None]] = -100

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, wanted = batch
        logits = model(tokens).flatten(0, 1)
        return F.cross_entropy(logits, wanted.flatten(), ignore_index=-100, reduction="sum"), (wanted != -100).sum()

    def start(run: Run) -> Advance:
        model = run.prepare(GPT())
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = run.optimizer(model, torch.optim.AdamW(groups, lr=1e-2))

        def advance(step: Step) -> None:
            step.accumulate(loss, model)
            step.update(optimizer)

        return advance

    return Workload(TensorDataset(inputs, targets), start)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 24, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(24, 10)

    def forward(self, sequences: Tensor) -> Tensor:
        scores: Tensor = self.head(self.lstm(sequences)[0][:, -1])
        return scores


def lstm() -> Workload:
    return _classifier(Recurrent, TensorDataset(_noise("lstm", 150, 9, 6), _labels("lstm", 10, 150)))


def gan() -> Workload:
    """Two models, two optimizers, two passes per step; the generator has batch norm and draws its own noise."""

    def start(run: Run) -> Advance:
        generator = run.prepare(nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)))
        critic = run.prepare(nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1)))
        generator_steps = run.optimizer(generator, lambda params: torch.optim.Adam(params, lr=1e-3, betas=(0.5, 0.9)))
        critic_steps = run.optimizer(critic, lambda params: torch.optim.RMSprop(params, lr=1e-3))

        def critic_loss(critic: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            (real,) = batch
            fake = generator(torch.randn(len(real), 8, device=real.device))
            return (F.softplus(-critic(real)) + F.softplus(critic(fake))).sum(), len(real)

        def generator_loss(generator: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            (real,) = batch
            return F.softplus(-critic(generator(torch.randn(len(real), 8, device=real.device)))).sum(), len(real)

        def advance(step: Step) -> None:
            step.accumulate(critic_loss, critic)
            step.update(critic_steps)
            step.accumulate(generator_loss, generator)
            step.update(generator_steps)

        return advance

    return Workload(TensorDataset(_noise("gan", 150, 16)), start)


class Awkward(nn.Module):
    """A parameter that only some samples use, one that none uses, a frozen one, and three precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 32)
        self.sometimes = nn.Linear(32, 32)
        self.never = nn.Linear(32, 32)
        self.frozen = nn.Linear(32, 32).requires_grad_(False)
        self.short = nn.Parameter(torch.randn(32).bfloat16())
        self.long = nn.Linear(32, 10).double()
        self.number = nn.Parameter(torch.tensor(1.5))  # without dimensions

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.frozen(self.first(inputs).tanh())
        if inputs[0, 0] > 0:  # in one lane yes, in another no
            hidden = hidden + self.sometimes(hidden)
        scores: Tensor = self.long((hidden + self.short).double()).float() * self.number
        return scores


def awkward() -> Workload:
    def start(run: Run) -> Advance:
        model = run.prepare(Awkward())
        trainable = [p for p in model.parameters() if p.requires_grad]
        # Momentum's first value is the gradient itself, so even the sign of a zero would show.
        first = run.optimizer(model, torch.optim.SGD(trainable[:3], lr=1e-2, momentum=0.9))
        second = run.optimizer(model, torch.optim.SGD(trainable[3:], lr=1e-2, momentum=0.9))

        def advance(step: Step) -> None:
            step.accumulate(cross_entropy, model)
            step.update(first, second)
            assert model.never.weight.grad is None
            assert model.frozen.weight.grad is None

        return advance

    return Workload(TensorDataset(_noise("awkward", 146, 20), _labels("awkward", 10, 146)), start)


def passes() -> Workload:
    """Two backward passes in every lane, in a custom loop."""

    def start(run: Run) -> Advance:
        model = run.prepare(nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 10)))
        optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9))

        def advance(step: Step) -> None:
            for inputs, labels in step.lanes:
                step.backward(F.cross_entropy(model(inputs), labels, reduction="sum"), len(labels), more=True)
                step.backward(0.1 * model(-inputs).square().sum(), 0)
            step.update(optimizer)

        return advance

    return Workload(TensorDataset(_noise("passes", 150, 20), _labels("passes", 10, 150)), start)


def terms() -> Workload:
    """A loss of two terms, each with its own count."""

    def start(run: Run) -> Advance:
        model = run.prepare(nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 10)))
        optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9))

        def loss(model: nn.Module, batch: Sequence[Tensor]) -> dict[str, tuple[Tensor, int]]:
            inputs, labels = batch
            scores = model(inputs)
            confident = int((labels < 5).sum())
            return {
                "entropy": (F.cross_entropy(scores, labels, reduction="sum"), len(labels)),
                "size": (scores[labels < 5].square().sum(), confident),
            }

        def advance(step: Step) -> None:
            step.accumulate(loss, model)
            step.update(optimizer)

        return advance

    return Workload(TensorDataset(_noise("terms", 146, 20), _labels("terms", 10, 146)), start)


class Remembering(nn.Module):
    """Has buffers that every forward pass changes, each to be combined in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 10)
        self.register_buffer("average", torch.zeros(10))
        self.register_buffer("newest", torch.zeros(10, dtype=torch.bfloat16))
        self.register_buffer("highest", torch.full((10,), -torch.inf))
        self.register_buffer("high_now", torch.zeros(10))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.layer(inputs)
        with torch.no_grad():
            self.average.data.lerp_(scores.mean(0), 0.1)
            self.newest = scores[-1].bfloat16()  # replaced, not changed
            torch.maximum(self.highest, scores.amax(0), out=self.highest)
            self.high_now.copy_(scores.amax(0))  # can fall, too
            self.calls += 1
        return scores


def remembering() -> Workload:
    def start(run: Run) -> Advance:
        model = run.prepare(Remembering())
        optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=1e-2))

        def advance(step: Step) -> None:
            step.accumulate(cross_entropy, model)
            step.update(optimizer)
            assert model.calls == step.number  # once a step, however many lanes

        return advance

    # 2 left over in batches of 48: of 8 lanes only the fourth and the last have a sample.
    return Workload(TensorDataset(_noise("remembering", 146, 20), _labels("remembering", 10, 146)), start)


def drawing() -> Workload:
    """A loss that draws from torch, numpy and Python, and an update that draws too."""

    def start(run: Run) -> Advance:
        model = run.prepare(nn.Linear(20, 10))
        optimizer = run.optimizer(model, lambda params: torch.optim.SGD(params, lr=1e-2))

        def loss(model: nn.Module, batch: Sequence[Tensor]) -> tuple[Tensor, int]:
            inputs, labels = batch
            noise = torch.randn(20) + float(np.random.randn()) + random.gauss(0, 1)
            return F.cross_entropy(model(inputs + noise), labels, reduction="sum"), len(labels)

        def advance(step: Step) -> None:
            step.accumulate(loss, model)
            step.update(optimizer)
            with torch.no_grad():
                model.weight += 1e-3 * torch.randn_like(model.weight)

        return advance

    return Workload(TensorDataset(_noise("drawing", 150, 20), _labels("drawing", 10, 150)), start)


_ALL = (mlp, conv, gpt, lstm, gan, awkward, passes, terms, remembering, drawing)

WORKLOADS: dict[str, Callable[[], Workload]] = {workload.__name__: workload for workload in _ALL}
