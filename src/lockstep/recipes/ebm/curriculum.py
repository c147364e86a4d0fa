"""The curriculum: outsiders are disguised with one step more, each time the model tells them from data well enough."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep.train.callbacks import Callback

if TYPE_CHECKING:
    from lockstep.train.trainer import Trainer

CRITERION = "auroc_in_training"  # of images against outsiders of the trained families, disguised as training does now


class Curriculum(Callback):
    """Grows by one step at an evaluation that meets the goal. It is saved with the run."""

    def __init__(self, first: int, last: int, goal: float) -> None:
        self.steps = first
        self._last = last
        self._goal = goal

    def on_evaluate(self, trainer: "Trainer", metrics: Mapping[str, Any]) -> None:
        if metrics[CRITERION] >= self._goal and self.steps < self._last:
            self.steps += 1
            trainer.run.log(disguise_steps=self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
