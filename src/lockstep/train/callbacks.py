"""Callbacks: what else a `Trainer` does at its few named points. `EarlyStopping` and `SaveBest` are built in.

All ranks call them with the same values, so they come to the same decisions without communicating.
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from lockstep.config.plurals import count_noun
from lockstep.errors import UserError

if TYPE_CHECKING:
    from lockstep.train.step import Step
    from lockstep.train.trainer import Trainer

Mode = Literal["min", "max"]


class Callback:
    """Base class: what a `Trainer` calls at its named points. Override the methods you need; each gets the `trainer`.

    Example:
        class PrintLoss(lockstep.Callback):
            def on_step(self, trainer, step):
                if step.every(100) and trainer.world.is_main:
                    print(step.number, step.loss)

    Attributes:
        metric: the name of the metric that it waits for, so that training without a validation set is an error; or
            None.
    """

    metric: str | None = None

    def on_start(self, trainer: "Trainer") -> None:
        """Called before the first step."""

    def on_step(self, trainer: "Trainer", step: "Step") -> None:
        """Called after each update. `step` is the step that made it."""

    def on_evaluate(self, trainer: "Trainer", metrics: Mapping[str, Any]) -> None:
        """Called after each evaluation, with its `metrics` by name. `trainer.stop(reason)` ends the training."""

    def on_end(self, trainer: "Trainer") -> None:
        """Called after the last evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's own state, for checkpoints."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""


class Best:
    """The best value of a metric so far, and the step it was reached at. A NaN is never the best."""

    def __init__(self, metric: str, mode: Mode, min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise UserError(f"mode={mode!r}: expected min or max")
        self.metric = metric
        self.step: int | None = None
        self.value: float | None = None
        self._sign = 1.0 if mode == "max" else -1.0
        self._min_delta = min_delta

    def improves(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Return whether this evaluation is the best so far; if so, remember it."""
        value = metrics.get(self.metric)
        if not isinstance(value, int | float):
            numbers = [name for name, other in metrics.items() if isinstance(other, int | float)]
            raise UserError(f"no metric is called {self.metric!r}; known: {', '.join(numbers) or 'none'}")
        if math.isnan(value):
            return False
        # Not `<=`: the difference of two infinities is NaN, and no improvement.
        if self.value is not None and not self._sign * (value - self.value) > self._min_delta:
            return False
        self.step, self.value = step, value
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.value = state["step"], state["value"]


class EarlyStopping(Callback):
    """Stops training when a metric has not improved for some evaluations.

    Example: `Trainer(…, callbacks=[lockstep.EarlyStopping("accuracy", "max", patience=3)])`.

    Args:
        metric: the metric's name.
        mode: "min" or "max": which direction is better.
        patience: stop after this many evaluations in a row without an improvement.
        min_delta: the smallest change that counts as an improvement.
    """

    def __init__(self, metric: str, mode: Mode, patience: int, min_delta: float = 0.0) -> None:
        if patience < 1:
            raise UserError(f"patience={patience}: expected 1 or more evaluations")
        self.metric = metric
        self.best = Best(metric, mode, min_delta)
        self._patience = patience
        self._waited = 0

    def on_evaluate(self, trainer: "Trainer", metrics: Mapping[str, Any]) -> None:
        if self.best.improves(trainer.step, metrics):
            self._waited = 0
            return
        self._waited += 1
        if self._waited >= self._patience:
            best = self.best
            trainer.stop(
                f"{best.metric} has not improved in {count_noun(self._waited, 'evaluation')}"
                + (f"; it was {best.value:.6g} at step {best.step}" if best.value is not None else "")
            )

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best.state_dict(), "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best.load_state_dict(state["best"])
        self._waited = state["waited"]


class SaveBest(Callback):
    """Saves a checkpoint whenever a metric reaches its best value so far, and keeps it until there is a better one.

    Example: `Trainer(…, callbacks=[lockstep.SaveBest("accuracy", "max")], folder="runs/mine")`; afterwards
    `lockstep.load_checkpoint(model, "runs/mine", best=True)` loads it.

    Args:
        metric: the metric's name.
        mode: "min" or "max": which direction is better.
    """

    def __init__(self, metric: str, mode: Mode) -> None:
        self.metric = metric
        self.best = Best(metric, mode)

    def on_start(self, trainer: "Trainer") -> None:
        if trainer.run.folder is None:
            raise UserError(f"SaveBest({self.best.metric!r}, …) needs a folder to save to: Trainer(…, folder=…)")

    def on_evaluate(self, trainer: "Trainer", metrics: Mapping[str, Any]) -> None:
        if self.best.improves(trainer.step, metrics):
            trainer.save_best()

    def state_dict(self) -> dict[str, Any]:
        return self.best.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best.load_state_dict(state)
