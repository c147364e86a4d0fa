"""The trainer: the loop of `Run` and `Step` for a model, a loss and metrics, with evaluation after every epoch.

for each step:  accumulate over this rank's lanes → update → event
after an epoch: evaluate on every sample of the validation set → event
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.data.evaluation import EvaluationLoader
from lockstep.train.run import Loader, Metrics, Run
from lockstep.train.step import Loss, Step
from lockstep.world.setup import setup_distributed
from lockstep.world.world import World


class Trainer:
    """Trains a module with an optimizer made for its parameters.

    `loss(model, batch)` returns a sum and a count. The device is the script's if it names one, else the world's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        metrics: Metrics | None = None,
        *,
        device: str | torch.device | None = None,
        run: Run | None = None,
    ) -> None:
        self.run = Run(None, setup_distributed(device=device)) if run is None else run
        self.model = self.run.prepare(model)
        self._optimizer = self.run.optimizer(self.model, optimizer)
        self._loss = loss
        self._metrics = metrics

    @property
    def world(self) -> World:
        return self.run.world

    @property
    def step(self) -> int:
        """Updates completed."""
        return self.run.step

    def train(
        self,
        train_loader: Loader | DataLoader[Any],
        val_loader: EvaluationLoader | DataLoader[Any] | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> list[dict[str, float]]:
        """Train for so many (more) epochs or steps; return each evaluation's metrics, the same on every rank."""
        loader = self.run.loader(train_loader) if isinstance(train_loader, DataLoader) else train_loader
        history: list[dict[str, float]] = []
        for last_of_epoch in self._train_epochs(loader, epochs, steps):
            if val_loader is not None and self._metrics is not None:
                values = self.evaluate(val_loader)
                self.run.journal.events.emit("eval", self.step, epoch=last_of_epoch.epoch + 1, metrics=values)
                history.append({"step": self.step, **values})
        return history

    def evaluate(self, loader: EvaluationLoader | DataLoader[Any]) -> dict[str, float]:
        """The mean of each metric over all ranks' samples, each counted once."""
        assert self._metrics is not None
        return self.run.evaluate(self.model, loader, self._metrics)

    def _train_epochs(self, loader: Loader, epochs: int | None, steps: int | None) -> Iterator[Step]:
        """Train, and yield each epoch's last step once it is complete."""
        self.model.train()
        previous: Step | None = None
        for step in self.run.open_steps(loader, epochs=epochs, steps=steps):
            if previous is not None and step.epoch != previous.epoch:
                yield previous
            step.accumulate(self._loss, self.model)
            step.update(self._optimizer)
            if step.every(self.run.log_every):
                self._tell(step)
            previous = step
        if previous is not None:
            if not previous.every(self.run.log_every):
                self._tell(previous)
            yield previous

    def _tell(self, step: Step) -> None:
        self.run.journal.events.emit("step", step.number, epoch=step.epoch, loss=step.loss, samples=step.batch.size)
