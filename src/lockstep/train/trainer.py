"""The trainer: the loop of `Run` and `Step` for a model, a loss and metrics.

callbacks: on_start
for each step:        accumulate over this rank's lanes → update → callbacks: on_step
at each evaluation:   every validation sample once → history → callbacks: on_evaluate, any of which may stop it
then, if it is time:  save
callbacks: on_end
"""

import inspect
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.config.duration import Duration, RunLength
from lockstep.data.evaluation import EvaluationLoader
from lockstep.data.foreign import Loader
from lockstep.errors import UserError
from lockstep.train.average import MovingAverage
from lockstep.train.callbacks import Callback
from lockstep.train.checkpoints import Saving
from lockstep.train.evaluation import Metrics
from lockstep.train.own_loss import num_samples, own_loss
from lockstep.train.run import Run
from lockstep.train.schedule import Factor, Schedule
from lockstep.train.step import Loss, Step
from lockstep.world.setup import setup_distributed
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

Entry = dict[str, Any]  # of the history: step, epoch, train_loss, and the metrics where there are any


class Trainer:
    """Trains a module with an optimizer made for its parameters.

    `loss(model, batch)` returns a sum and a count; without one, the model's output carries its loss. `metrics(model,
    batch)` is what evaluation computes, the loss if there are none. With an `average`, that is what is evaluated. The
    device is the script's if it names one, else the world's.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss = own_loss,
        metrics: Metrics | None = None,
        *,
        schedule: Schedule | Factor | None = None,
        average: MovingAverage | None = None,
        callbacks: Sequence[Callback] = (),
        device: str | torch.device | None = None,
        run: Run | None = None,
    ) -> None:
        self.run = Run(None, setup_distributed(device=device)) if run is None else run
        self.model = self.run.prepare(model)
        self.optimizer = self.run.optimizer(self.model, optimizer, schedule)
        if average is not None and not self.run.moves(average):
            raise UserError("this average would never move: make it by run.average(model), after run.prepare(model)")
        self.average = average
        self.history: list[Entry] = []
        self.metrics: dict[str, Any] = {}  # of the latest evaluation
        self._loss = loss
        self._metrics = metrics or self._loss_as_metric
        self._callbacks = list(callbacks)
        self._stop_reason: str | None = None
        self._stage = _Stage()
        self._is_best = False
        self._save_every: int | None = None  # steps
        self.run.keep("trainer", self)

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
        evaluate_every: Duration | str | int = "1 epoch",
        saving: Saving | None = None,
    ) -> list[Entry]:
        """Train for so many (more) epochs or steps; return the history, the same on every rank.

        Where the run has a folder, what an earlier attempt has made of them is not made again. `saving`: when to save
        besides the end, and how many checkpoints stay.
        """
        loader = self.run.loader(train_loader) if isinstance(train_loader, DataLoader) else train_loader
        evaluation = _Timetable(evaluate_every, self.run.length(loader))
        self._stop_reason = None
        self._stage = _Stage()
        for callback in self._callbacks:
            callback.on_start(self)
        saving = saving or Saving()
        self._save_every = saving.in_steps(self.run.length(loader))
        # This saves itself, after the evaluation where there is one: what is saved then includes it.
        training = self.run.open_steps(loader, epochs=epochs, steps=steps, saving=replace(saving, every=None))
        for _ in self._stages(training, evaluation):
            self._conclude(val_loader)
            self._save_if_due()
            if self._stop_reason is not None:
                self.run.log(stopped=self._stop_reason)
                break
        for callback in self._callbacks:
            callback.on_end(self)
        return self.history

    def enable_gradient_checkpointing(self, *, every: int = 1, classes: Sequence[str] = ()) -> str:
        """Keep less for the backward pass and compute it again there: see `Run.checkpoint_activations`."""
        return self.run.checkpoint_activations(self.model, every=every, classes=classes)

    def stop(self, reason: str) -> None:
        """End the training after this evaluation. Every rank must come to the same decision."""
        self._stop_reason = reason

    def keep_best(self) -> None:
        """Save after this evaluation, as the best so far. Every rank must come to the same decision."""
        self._is_best = True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold besides the run's own: the history, and where it is between two evaluations."""
        return {
            "history": self.history,
            "metrics": self.metrics,
            "stop_reason": self._stop_reason,
            "stage": self._stage.state_dict(),
            "callbacks": [(type(callback).__name__, callback.state_dict()) for callback in self._callbacks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.history, self.metrics = state["history"], state["metrics"]
        self._stop_reason = state["stop_reason"]
        self._stage.load_state_dict(state["stage"], self.world.device)
        saved = list(state["callbacks"])
        for callback in self._callbacks:
            kind = type(callback).__name__
            mine = next((each for each in saved if each[0] == kind), None)
            if mine is not None:
                saved.remove(mine)
                callback.load_state_dict(mine[1])
            elif callback.state_dict():
                logger.warning("%s is new in this run: it knows nothing of the %d steps so far", kind, self.step)
        if lost := [kind for kind, values in saved if values]:
            logger.warning("what the run knew for %s is dropped: this trainer has no such callback", ", ".join(lost))

    def evaluate(self, loader: EvaluationLoader | DataLoader[Any]) -> dict[str, Any]:
        """The metrics over all ranks' samples, each counted once."""
        with self.evaluated_weights():
            return self.run.evaluate(self.model, loader, self._metrics)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the averaged weights, where there is an average."""
        return nullcontext() if self.average is None else self.average.applied()

    def _stages(self, training: Iterator[Step], evaluation: "_Timetable") -> Iterator[None]:
        """Train, and stop by whenever it is time to evaluate; at the end in any case."""
        self.model.train()
        last: Step | None = None  # if nothing was said of it yet
        for step in training:
            if self._stop_reason is not None:  # an earlier attempt had come to its end
                return
            if evaluation.is_due(self._stage, step):
                yield
            else:
                self._save_if_due()
            step.accumulate(self._loss, self.model)
            step.update(self.optimizer)
            self._stage.add(step)
            if step.is_updated:
                if step.every(self.run.log_every):
                    self._tell(step)
                for callback in self._callbacks:
                    callback.on_step(self, step)
            last = step if step.is_updated and not step.every(self.run.log_every) else None
        if last is not None:
            self._tell(last)
        if not self._stage.is_empty:
            yield

    def _conclude(self, val_loader: EvaluationLoader | DataLoader[Any] | None) -> None:
        stage, self._stage = self._stage, _Stage()
        entry: Entry = {"step": self.step, "epoch": stage.epoch + 1, "train_loss": stage.mean_loss()}
        if val_loader is not None:
            self.metrics = self.evaluate(val_loader)
            self.run.journal.events.emit("eval", metrics=self.metrics, **entry)
            entry |= self.metrics
        self.history.append(entry)
        self.run.journal.save_history(self.history)
        if val_loader is not None:
            for callback in self._callbacks:
                callback.on_evaluate(self, self.metrics)

    def _save_if_due(self) -> None:
        every = self._save_every
        is_time = every is not None and self.step > 0 and self.step % every == 0 and not self.run.is_saved
        if self._is_best or is_time:
            self.run.save(is_best=self._is_best, metrics=self.metrics)
            self._is_best = False

    def _tell(self, step: Step) -> None:
        values: dict[str, Any] = {"epoch": step.epoch, "loss": step.loss, "samples": step.batch.size}
        values["lr"] = float(self.optimizer.param_groups[0]["lr"])
        if step.norm is not None:
            values["gradient_norm"] = step.norm.item()
        if self.run.loss_scale is not None:
            values["loss_scale"] = self.run.loss_scale
        values |= self.run.traffic
        self.run.journal.events.emit("step", step.number, **values)

    def _loss_as_metric(self, model: Any, batch: Any) -> Any:
        weight = inspect.signature(self._loss).parameters.get("weight")
        if weight is not None and weight.default is weight.empty:  # a loss for padded lanes; here nothing is padded
            rows = num_samples(batch)
            loss = self._loss(model, batch, weight=torch.ones(rows, device=self.world.device))
        else:
            loss = self._loss(model, batch)
        return {"loss": loss} if isinstance(loss, tuple) else loss


class _Stage:
    """The steps between two evaluations."""

    def __init__(self) -> None:
        self.is_empty = True
        self.epoch = 0  # of the last step, and
        self.step = 0  # its number, if it was an update
        self._num_updates = 0
        self._total_loss: Tensor | None = None  # stays on the device until it is shown

    def add(self, step: Step) -> None:
        self.is_empty = False
        self.epoch = step.epoch
        self.step = step.number if step.is_updated else 0
        if step.is_updated:
            self._num_updates += 1
            self._total_loss = step.loss_tensor if self._total_loss is None else self._total_loss + step.loss_tensor

    def mean_loss(self) -> float:
        return math.nan if self._total_loss is None else self._total_loss.item() / self._num_updates

    def state_dict(self) -> dict[str, Any]:
        return {
            "is_empty": self.is_empty,
            "epoch": self.epoch,
            "step": self.step,
            "num_updates": self._num_updates,
            "total_loss": self._total_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.is_empty, self.epoch, self.step = state["is_empty"], state["epoch"], state["step"]
        self._num_updates, total = state["num_updates"], state["total_loss"]
        self._total_loss = None if total is None else total.to(device)


class _Timetable:
    """When to evaluate: by whole epochs, or by updates."""

    def __init__(self, evaluate_every: Duration | str | int, length: RunLength) -> None:
        try:
            every = Duration.parse(evaluate_every)
        except ValueError as error:
            raise UserError(f"evaluate_every: {error}") from None
        if not every.number:
            raise UserError(f"evaluate_every={evaluate_every}: expected a duration greater than 0")
        self._epochs = int(every.number) if every.unit == "epochs" and every.number % 1 == 0 else None
        if self._epochs is None:
            self._steps = every.in_steps(length, "evaluate_every")

    def is_due(self, done: _Stage, coming: Step) -> bool:
        if done.is_empty:
            return False
        if self._epochs is not None:
            return coming.epoch != done.epoch and coming.epoch % self._epochs == 0
        return done.step > 0 and done.step % self._steps == 0
