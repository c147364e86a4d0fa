"""The trainer: the loop over batches, with evaluation, events and timing. One process is not a special case.

for each epoch:
    for each batch:  loss → backward (gradients of the global mean) → optimizer step → event
    evaluate on every sample of the test set → event
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.engine.ddp import Replicas
from lockstep.events.event import Events, Sink
from lockstep.metrics.tally import Tally
from lockstep.world.memory import peak_memory_bytes
from lockstep.world.setup import setup_distributed
from lockstep.world.world import World

Loss = Callable[[nn.Module, Any], tuple[Tensor, int]]
Metrics = Callable[[nn.Module, Any], Mapping[str, tuple[Tensor | float, int]]]


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
        world: World | None = None,
        events: Events | None = None,
        rank_log: Sink | None = None,
        log_every: int = 10,
    ) -> None:
        self.world = setup_distributed(device=device) if world is None else world
        self.device = self.world.device if device is None else torch.device(device)
        self.model = model.to(self.device)
        self.step = 0
        self._replicas = Replicas(self.model, self.world)
        self._optimizer = optimizer
        self._loss = loss
        self._metrics = metrics
        self._events = events or Events()
        self._rank_log = Events([rank_log] if rank_log else [], self._events.attempt)
        self._log_every = log_every

    def train(
        self,
        train_loader: DataLoader[Any],
        val_loader: DataLoader[Any] | None = None,
        *,
        epochs: int | None = None,
        steps: int | None = None,
    ) -> list[dict[str, float]]:
        """Train for so many (more) epochs or steps; return each evaluation's metrics, the same on every rank."""
        if (epochs is None) == (steps is None):
            raise ValueError("give either epochs or steps")
        to_do = steps if epochs is None else epochs * len(train_loader)
        assert to_do is not None
        last_step = self.step + to_do
        history: list[dict[str, float]] = []
        epoch = 0
        while self.step < last_step:
            before = self.step
            _set_epoch(train_loader, epoch)
            self._train_epoch(train_loader, last_step, epoch)
            if self.step == before:
                raise ValueError("the training loader is empty")
            epoch += 1
            if val_loader is not None and self._metrics is not None:
                values = self.evaluate(val_loader)
                self._events.emit("eval", self.step, epoch=epoch, metrics=values)
                history.append({"step": self.step, **values})
        return history

    @torch.no_grad()
    def evaluate(self, loader: DataLoader[Any]) -> dict[str, float]:
        """The mean of each metric over all ranks' samples, each counted once."""
        assert self._metrics is not None
        was_training = self.model.training
        self.model.eval()
        tally = Tally(self.device)
        for batch in loader:
            tally.add(self._metrics(self.model, _to_device(batch, self.device)))
        self.model.train(was_training)
        return tally.means()

    def _train_epoch(self, loader: DataLoader[Any], last_step: int, epoch: int) -> None:
        self.model.train()
        started = time.perf_counter()
        for batch in loader:
            fetched = time.perf_counter()
            self._optimizer.zero_grad()
            total = self._replicas.backward(*self._loss(self._replicas.wrapped, _to_device(batch, self.device)))
            self._optimizer.step()
            self.step += 1
            last = self.step == last_step
            if last or self.step % self._log_every == 0:
                mean = (total.loss_sum / total.num_losses).item()
                timing = {"data_s": fetched - started, "compute_s": time.perf_counter() - fetched}
                self._events.emit("step", self.step, epoch=epoch, loss=mean, samples=int(total.num_losses))
                self._rank_log.emit("step", self.step, **timing, **peak_memory_bytes(self.device))
            if last:
                return
            started = time.perf_counter()


def _set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    for sampler in (loader.batch_sampler, loader.sampler):
        if (set_epoch := getattr(sampler, "set_epoch", None)) is not None:
            set_epoch(epoch)


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: _to_device(element, device) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [_to_device(element, device) for element in value]
    return value
