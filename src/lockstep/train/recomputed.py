"""Which of a run's models recompute activations, and whether that is what its options ask for."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lockstep.train.activation_checkpointing import (
    Chosen,
    checkpoint_what_there_is,
    nothing_repeated,
    require_all_classes,
)


class Recomputed:
    """`asked`: the run's option; `facts`: of its start event, where the modules' names are told."""

    def __init__(self, asked: Mapping[str, Any] | None, facts: dict[str, Any]) -> None:
        self._asked = asked
        self._facts = facts
        self._modules: dict[nn.Module, str] = {}  # which of a model's modules

    def begin(self, model: nn.Module) -> None:
        """Do as the option says with a new model."""
        if self._asked is not None:
            self.note(model, checkpoint_what_there_is(model, **self._asked))

    def note(self, model: nn.Module, chosen: Chosen | None) -> None:
        if chosen is not None:
            self._modules[model] = str(chosen)
            self._facts["recomputed"] = "; ".join(self._modules.values())

    def check(self, models: Sequence[nn.Module]) -> None:
        """One of several models may have nothing of what the option says, but not all."""
        if self._asked is None or not models:
            return
        require_all_classes(models, self._asked.get("classes", ()))
        if not self._modules:
            raise nothing_repeated(models)
