"""A run in which every part has state, to be stopped and resumed."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.errors import Stopped
from lockstep.train.optim.lr_schedule import Schedule
from lockstep.train.run import Run
from lockstep.world.world import World
from tests.classification import loss


class Noisy(Dataset[tuple[Tensor, int]]):
    """Draws from every random stream."""

    def __len__(self) -> int:
        return 45

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((6,), index / 45) + torch.randn(6) + random.random(), index % 3


class Curriculum:
    """A user's object with state: numbers, text, tensors, a random state."""

    def __init__(self) -> None:
        self.difficulty = 0.1
        self.seen = torch.zeros(3)
        self.draws = random.Random(5)

    def advance(self) -> None:
        self.difficulty *= 1.0 + self.draws.random()
        self.seen += self.difficulty

    def state_dict(self) -> dict[str, Any]:
        return {"difficulty": self.difficulty, "seen": self.seen, "draws": self.draws.getstate()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.difficulty, self.seen = state["difficulty"], state["seen"]
        self.draws.setstate(state["draws"])


class Ended(NamedTuple):
    digest: str
    difficulty: float
    rates: list[float]


def train_all(world: World, folder: Path | None, stop_after: int | None, workers: int = 0, **options: Any) -> Ended:
    """Train with everything that has state: momentum, schedule, average, loss scale, batch norm, a curriculum."""
    torch.set_num_threads(1)
    run = Run(folder, world, seed=2, clip_norm=0.5, sinks=[], **options)
    run.stop_after = stop_after
    model = run.prepare(nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3)))
    optimizer = run.optimizer(
        model, lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9), Schedule.cosine(warmup=3, final=0.1)
    )
    run.ema(model, 0.9)
    curriculum = Curriculum()
    run.register_state("curriculum", curriculum)
    loader = run.loader(Noisy(), 16, lanes=4, tail="drop", workers=workers)
    rates = []
    try:
        for step in run.steps(loader, epochs=4, finish=False):  # of two steps
            step.accumulate(loss, model)
            step.update(optimizer)
            curriculum.advance()
            rates.append(optimizer.param_groups[0]["lr"])
        run.finish()
    except Stopped:
        run.close()
    return Ended(run.digest(), curriculum.difficulty, rates)
