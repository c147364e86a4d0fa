"""A pass over the lanes, from its end to the update that uses its gradients; and what undoes it if none does."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.engine import Engine, GradientPass
from lockstep.engine.gradient_math import scale_gradients
from lockstep.engine.lane_buffers import BufferSlot
from lockstep.engine.loss_table import Term, Terms
from lockstep.train.optim.nonfinite import Replay
from lockstep.train.train_state import Models

Loss = Callable[..., Term | Terms]
"""`loss(model, batch)` → a sum and a count, or several by name; with `tail="pad"`, `loss(model, batch, weight=…)`."""


class SavedBuffer(NamedTuple):
    """A buffer before the lanes ran: the tensor and its value, because either may be replaced."""

    slot: BufferSlot
    tensor: Tensor | None
    value: Tensor | None

    @classmethod
    def capture(cls, slot: BufferSlot) -> Self:
        return cls(slot, *(None, None) if slot.is_empty else (slot.tensor, slot.tensor.clone()))

    def restore(self) -> None:
        """Restore it whether or not it has changed: batch norm's kernels do not bump a tensor's version."""
        self.slot.set(self.tensor)
        if self.tensor is not None and self.value is not None:
            self.tensor.copy_(self.value)


@dataclass(eq=False)
class PendingPass:
    """A pass over the lanes whose gradients no update has used yet."""

    engine: Engine
    lane_pass: GradientPass
    parameters: list[Parameter]
    number: int  # of the passes in this step
    factor: Tensor | None = None  # what fp16 losses were multiplied by; by the update, the scaler's may have changed
    factor_value: float = 1.0  # as a Python number
    loss_function: Loss | None = None  # called with each lane's data, if known
    model: Models | None = None  # which it was called with
    replay: Replay | None = None  # made when needed: it refers back to this object, and reference cycles are freed late
    buffers: list[SavedBuffer] = field(default_factory=list)
    has_gradients: bool = False  # once it is finished

    def scaled(self, terms: Terms) -> Terms:
        if self.factor is None:
            return terms
        return {name: (loss_sum.float() * self.factor, count) for name, (loss_sum, count) in terms.items()}

    def finish(self) -> None:
        """Wait for the sum of gradients over all lanes of all ranks, and remove the loss scale from it."""
        self.lane_pass.finish()
        self.has_gradients = any(parameter.grad is not None for parameter in self.parameters)
        if self.factor is not None:
            scale_gradients(self.engine.reduced(self.parameters).gradients, 1.0 / self.factor)

    def inherit_buffers(self, buffers: list[SavedBuffer]) -> None:
        """Take over the saved buffers of an earlier pass that was undone: undoing this one must restore those."""
        before = {saved.slot: saved for saved in buffers}
        self.buffers = [before.get(saved.slot, saved) for saved in self.buffers]

    def loss(self) -> Tensor:
        return self.lane_pass.loss() / self.factor_value

    def restore_buffers(self) -> None:
        """Undo what the pass did to the buffers: non-finite values may have reached them, too."""
        for saved in self.buffers:
            saved.restore()
