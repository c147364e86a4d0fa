"""How much weight the codes' cost has: little at first, so that there is something in them before they are pressed."""

from lockstep.train.callbacks import Callback
from lockstep.train.trainer import Trainer


class BetaWarmup(Callback):
    """Beta rises in a straight line over so many steps. It follows from the step alone: there is nothing to save."""

    def __init__(self, beta: float, steps: int) -> None:
        self._beta = beta
        self._steps = steps
        self._trainer: Trainer | None = None

    def on_start(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def beta(self) -> float:
        """For the step under way; outside of a training, where it will end."""
        if self._trainer is None:
            return self._beta
        return self.after(self._trainer.step)

    def after(self, steps: int) -> float:
        """For the step that follows so many completed ones."""
        return self._beta if steps >= self._steps else self._beta * (steps + 1) / (self._steps + 1)
