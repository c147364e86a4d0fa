"""Writing a trace: after each step, the digests of what went in, what came out, and what is left.

It is the same text on any number of ranks, as long as they compute the same: `first_difference` finds where not.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from lockstep.data.batch import GlobalBatch
from lockstep.engine.digest import State, tensor_digests, value_digest
from lockstep.events.jsonl import JsonLines
from lockstep.events.trace import PHASES, Phases
from lockstep.world.objects import all_gather_object

# 64 bits are plenty to tell two tensors apart, and a trace has a line for every step.
_DIGITS = 16

_NO_GRADIENT = "none"


class DigestTrace:
    """Every rank has one, and they record each step together; the one with a path writes."""

    def __init__(self, path: Path | None) -> None:
        self._lines = None if path is None else JsonLines(path)
        self._data: dict[str, str] = {}

    def begin(self, batch: GlobalBatch) -> None:
        """Look at a step's data, before anybody can change it in place."""
        self._data = {f"lane {lane.lane}": value_digest((lane.data, lane.weight))[:_DIGITS] for lane in batch.lanes}

    def record(self, step: int, loss: float, gradients: Mapping[str, Tensor | None], state: State) -> None:
        """`gradients`: as the optimizers saw them. Every rank must call it."""
        used = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        own: Phases = {
            "data": self._data,
            "loss": {"loss": repr(loss)},
            "gradient": dict.fromkeys(gradients, _NO_GRADIENT) | _shortened(used),
            "state": _shortened(state),
        }
        phases = _together(all_gather_object(own))
        if self._lines is not None:
            self._lines.emit({"step": step, "phases": phases})

    def record_state(self, number: int, state: State) -> None:
        """After a round, which has no gradients. Every rank must call it."""
        phases = _together(all_gather_object({"state": _shortened(state)}))
        if self._lines is not None:
            self._lines.emit({"step": number, "phases": phases})

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def _shortened(state: State) -> dict[str, str]:
    digests = tensor_digests(state)
    return {name: digests[name][:_DIGITS] for name in state}  # in the model's own order


def _together(ranks: Sequence[Phases]) -> Phases:
    """What all ranks say. Where they contradict each other, it is all of it: no other run's trace will be like that."""
    together: Phases = {}
    for phase in (phase for phase in PHASES if phase in ranks[0]):
        said: dict[str, dict[str, None]] = {}
        for rank in ranks:
            for name, text in rank[phase].items():
                said.setdefault(name, {})[text] = None
        together[phase] = {name: " ≠ ".join(texts) for name, texts in said.items()}
    return together
