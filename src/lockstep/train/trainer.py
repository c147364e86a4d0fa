"""`Trainer`: a ready-made loop over `Run` and `Step`, for a model, a loss and metrics.

callbacks: on_start
for each step:        forward and backward over this rank's lanes → update → callbacks: on_step
at each evaluation:   metrics over the validation set → history → callbacks: on_evaluate, any of which may stop it
callbacks: on_end
"""

import inspect
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lockstep.config.duration import Duration, RunLength
from lockstep.config.plurals import count_noun
from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.data.loader_factory import Loader, require_loader
from lockstep.errors import UserError
from lockstep.train.callbacks import Callback
from lockstep.train.evaluate import Metrics
from lockstep.train.model_loss import batch_length, own_loss
from lockstep.train.optim.ema import ExponentialMovingAverage
from lockstep.train.optim.lr_schedule import Factor, Schedule
from lockstep.train.pending_pass import Loss
from lockstep.train.resume.checkpoint_policy import CheckpointPolicy
from lockstep.train.resume.progress import length_of_run
from lockstep.train.run import Run
from lockstep.train.step import Step
from lockstep.world.process_group import setup_distributed
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

HistoryEntry = dict[str, Any]  # step, epoch, train_loss, and the metrics where there is a validation set


class Trainer:
    """Trains a module with an optimizer, evaluates it, and, with a folder, saves and resumes.

    With a folder, run the same script again to continue; `train` then makes only the steps that are left.

    Example:
        trainer = Trainer(model, torch.optim.AdamW(model.parameters(), lr=3e-4), loss, metrics, folder="runs/mine")
        history = trainer.train(train_loader, val_loader, epochs=10)

    Args:
        model: the module to train. A DataParallel or DistributedDataParallel around it is removed.
        optimizer: an optimizer of its parameters.
        loss: `loss(model, batch)` returns a sum and a count. Default: the model's output is a mean loss, or has one as
            `output.loss` or `output["loss"]`.
        metrics: `metrics(model, batch)`, what evaluation computes, as for `Run.evaluate`. Default: the loss.
        schedule: the learning rate's schedule, as for `Run.optimizer`.
        ema: an average made by `run.ema(model)`; evaluation then uses the averaged weights.
        callbacks: called at the start, after each update, after each evaluation and at the end; see `Callback`.
        device: where to train. Default: the device of this process.
        folder: where to write events and checkpoints, and what to resume from. None: nothing is written.
        run: in place of `folder` and `device`, a `Run` made with the options you want.

    Attributes:
        history: one dictionary per evaluation: `step`, `epoch`, `train_loss`, and the metrics if there is a validation
            set.
        metrics: the metrics of the latest evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Loss = own_loss,
        metrics: Metrics | None = None,
        *,
        schedule: Schedule | Factor | None = None,
        ema: ExponentialMovingAverage | None = None,
        callbacks: Sequence[Callback] = (),
        device: str | torch.device | None = None,
        folder: str | Path | None = None,
        run: Run | None = None,
    ) -> None:
        if run is not None and (folder is not None or device is not None):
            raise UserError("Trainer: give either run=, or folder= and device=: a run has its own")
        self.run = Run(folder, setup_distributed(device=device)) if run is None else run
        self.model = self.run.prepare(model)
        self.optimizer = self.run.optimizer(self.model, optimizer, schedule)
        if ema is not None and not self.run.has_ema(ema):
            raise UserError(
                "ema= takes what run.ema(model, decay) returns: no update of this run would move this "
                f"{type(ema).__name__}"
            )
        self.ema = ema
        self.history: list[HistoryEntry] = []
        self.metrics: dict[str, Any] = {}
        self._loss = loss
        self._metrics = metrics or self._loss_as_metric
        self._callbacks = _checked(callbacks)
        self._stop_reason: str | None = None
        self._period = _TrainingPeriod()
        self.run.register_state("trainer", self)

    @property
    def world(self) -> World:
        """This process's place in the job."""
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
        checkpoints: CheckpointPolicy | None = None,
        finish: bool = True,
    ) -> list[HistoryEntry]:
        """Train for this many epochs or updates, less those that an earlier attempt has made.

        Call it again in the same script to train for more.

        Args:
            train_loader: what `run.loader` returned, or a torch DataLoader, whose batch size is the global batch.
            val_loader: what to evaluate on. None: the history has the training loss only.
            epochs: how many epochs to train, or
            steps: how many updates.
            evaluate_every: `"1 epoch"`, or a number of updates. The end is always evaluated.
            checkpoints: when to save besides the end, and how many checkpoints stay.
            finish: with a folder, call `run.finish()` at the end: it saves the run as finished, and then the run takes
                no more logs. With False, call it yourself.

        Returns `history`, the same on every rank.
        """
        given = self.run.loader(train_loader) if isinstance(train_loader, DataLoader) else train_loader
        loader = require_loader("trainer.train", given)
        schedule = _EvaluationSchedule(evaluate_every, length_of_run(loader))
        self._stop_reason = None
        self._period = _TrainingPeriod()
        for callback in self._callbacks:
            if callback.metric is not None and val_loader is None:
                raise UserError(
                    f"{type(callback).__name__}({callback.metric!r}, …) needs evaluations: "
                    "trainer.train(train_loader, val_loader, …)"
                )
            callback.on_start(self)
        self.model.train()
        for step in self.run.steps(
            loader, epochs=epochs, steps=steps, checkpoints=checkpoints or CheckpointPolicy(), finish=False
        ):
            if self._stop_reason is not None:  # an earlier attempt was stopped here by a callback
                break
            step.accumulate(self._loss, self.model)
            step.update(self.optimizer)
            self._period.add(step)
            self._after_update(step)
            if schedule.is_due(step) or self._stop_reason is not None:
                self._end_period(val_loader)
            if self._stop_reason is not None:
                self.run.log(stopped=self._stop_reason)
                self.run.end_steps()
        for callback in self._callbacks:
            callback.on_end(self)
        if finish and self.run.folder is not None and not self.run.resumes_later:
            self.run.finish(metrics=self.metrics)
        return self.history

    def evaluate(self, loader: EvaluationLoader | DataLoader[Any]) -> dict[str, Any]:
        """Return the metrics over all ranks' samples, each counted once. All ranks must call it."""
        with self.evaluated_weights():
            return self.run.evaluate(self.model, loader, self._metrics)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the averaged weights, if there is an `ema`."""
        return nullcontext() if self.ema is None else self.ema.applied()

    def enable_gradient_checkpointing(self, *, every: int = 1, classes: Sequence[str] = ()) -> str:
        """Recompute activations in the backward pass: less memory, more time, the same bits.

        Args:
            every: recompute every `every`-th of the modules chosen.
            classes: the names of the module classes to choose. Default: the blocks that the model repeats.

        Returns a description of the modules chosen.
        """
        return self.run.checkpoint_activations(self.model, every=every, classes=classes)

    def stop(self, reason: str) -> None:
        """End the training after this step. Every rank must come to the same decision."""
        self._stop_reason = reason

    def save_best(self) -> None:
        """Save after this step, as the best so far. Every rank must come to the same decision."""
        self.run.save(is_best=True)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the run's own state."""
        return {
            "history": self.history,
            "metrics": self.metrics,
            "stop_reason": self._stop_reason,
            "stage": self._period.state_dict(),
            "callbacks": [(type(callback).__name__, callback.state_dict()) for callback in self._callbacks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. The run calls it on resume."""
        self.history, self.metrics = state["history"], state["metrics"]
        self._stop_reason = state["stop_reason"]
        self._period.load_state_dict(state["stage"], self.world.device)
        if self.metrics:
            self.run.checkpoint_metadata["metrics"] = self.metrics
        saved = list(state["callbacks"])
        for callback in self._callbacks:
            kind = type(callback).__name__
            mine = next((each for each in saved if each[0] == kind), None)
            if mine is not None:
                saved.remove(mine)
                callback.load_state_dict(mine[1])
            elif callback.state_dict():
                logger.warning("%s is new in this run: it has missed %s", kind, count_noun(self.step, "step"))
        if lost := [kind for kind, values in saved if values]:
            logger.warning("the saved state of %s is dropped: this trainer has no such callback", ", ".join(lost))

    def _after_update(self, step: Step) -> None:
        if not step.is_updated:
            return
        if step.every(self.run.log_every) or step.is_last:
            self._log_step(step)
        for callback in self._callbacks:
            callback.on_step(self, step)

    def _end_period(self, val_loader: EvaluationLoader | DataLoader[Any] | None) -> None:
        """Evaluate, and add a line to the history."""
        period, self._period = self._period, _TrainingPeriod()
        entry: HistoryEntry = {"step": self.step, "epoch": period.epoch + 1, "train_loss": period.mean_loss()}
        if val_loader is not None:
            self.metrics = self.evaluate(val_loader)
            self.run.checkpoint_metadata["metrics"] = self.metrics
            self.run.run_log.events.emit("eval", metrics=self.metrics, **entry)
            entry |= self.metrics
        self.history.append(entry)
        self.run.run_log.save_history(self.history)
        if val_loader is not None:
            for callback in self._callbacks:
                callback.on_evaluate(self, self.metrics)

    def _log_step(self, step: Step) -> None:
        values: dict[str, Any] = {"epoch": step.epoch, "loss": step.loss, "samples": step.batch.size}
        values["lr"] = float(self.optimizer.param_groups[0]["lr"])
        if self.run.options.clip_norm is not None:
            values["gradient_norm"] = step.grad_norm.item()
        if self.run.loss_scale is not None:
            values["loss_scale"] = self.run.loss_scale
        values |= self.run.traffic
        self.run.run_log.events.emit("step", step.number, **values)

    def _loss_as_metric(self, model: Any, batch: Any) -> Any:
        weight = inspect.signature(self._loss).parameters.get("weight")
        if weight is not None and weight.default is weight.empty:  # a loss for padded lanes; here nothing is padded
            rows = batch_length(batch)
            loss = self._loss(model, batch, weight=torch.ones(rows, device=self.world.device))
        else:
            loss = self._loss(model, batch)
        return {"loss": loss} if isinstance(loss, tuple) else loss


def _checked(callbacks: Any) -> list[Callback]:
    given = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
    wrong = next((each for each in given if not isinstance(each, Callback)), None)
    if wrong is not None or not isinstance(callbacks, Sequence):
        raise UserError(
            f"callbacks=… takes a list of callbacks, each made from a class that inherits from lockstep.Callback, not "
            f"{callbacks if wrong is None else wrong!r}"
        )
    return given


class _TrainingPeriod:
    """The steps between two evaluations."""

    def __init__(self) -> None:
        self.epoch = 0  # of the last step
        self._is_empty = True
        self._step = 0  # the last step's number, if it made an update
        self._num_updates = 0
        self._total_loss: Tensor | None = None  # stays on the device until it is shown

    def add(self, step: Step) -> None:
        self._is_empty = False
        self.epoch = step.epoch
        self._step = step.number if step.is_updated else 0
        if step.is_updated:
            self._num_updates += 1
            self._total_loss = step.loss_tensor if self._total_loss is None else self._total_loss + step.loss_tensor

    def mean_loss(self) -> float:
        return math.nan if self._total_loss is None else self._total_loss.item() / self._num_updates

    def state_dict(self) -> dict[str, Any]:
        return {
            "is_empty": self._is_empty,
            "epoch": self.epoch,
            "step": self._step,
            "num_updates": self._num_updates,
            "total_loss": self._total_loss,
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        self._is_empty, self.epoch, self._step = state["is_empty"], state["epoch"], state["step"]
        self._num_updates, total = state["num_updates"], state["total_loss"]
        self._total_loss = None if total is None else total.to(device)


class _EvaluationSchedule:
    """When to evaluate: by whole epochs or by updates, and after the last step."""

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

    def is_due(self, step: Step) -> bool:
        if self._epochs is not None:
            is_time = (step.epoch + 1) % self._epochs == 0 and step.is_epoch_end
        else:
            is_time = step.is_updated and step.number % self._steps == 0
        return is_time or step.is_last
