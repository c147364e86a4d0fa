"""What a training step asks of an engine, whichever way gradients come together."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.nn import Parameter

from lockstep.engine.reduced import Reduced, WholeGradients
from lockstep.engine.table import Terms
from lockstep.errors import UserError


class LanePass(Protocol):
    """One pass over this rank's lanes, which ends in gradients."""

    def open_lane(self, lane: int, size: int) -> None: ...

    def backward(self, terms: Terms, *, more: bool, retain_graph: bool = False) -> None:
        """`more`: another backward pass follows in the same lane."""
        ...

    def close_lane(self) -> None: ...

    def end(self) -> None:
        """All lanes are closed."""
        ...

    def finish(self) -> None:
        """Wait until the gradients over all lanes of all ranks, divided by the counts, stand in `.grad`."""
        ...

    def loss(self) -> Tensor:
        """Over all lanes of all ranks; after `finish`."""
        ...

    def loss_sums(self) -> list[Tensor]:
        """Tensors of the engine's own with every lane's sums of losses in them; after `finish`."""
        ...

    def nonfinite_lanes(self) -> list[int]:
        """The lanes of all ranks whose losses are not finite; after `finish`."""
        ...


class Travel(NamedTuple):
    """What an engine's gradients and buffers have taken to reach the other ranks, so far."""

    seconds: float | None = None  # waiting for other ranks included; on a GPU, in timed steps. None: not known
    num_bytes: int = 0  # sent by this rank


class Engine(Protocol):
    can_replay: bool  # may a rank run lanes of its own once more, for itself?

    def start_pass(self, parameters: Sequence[Parameter], *, divide_late: bool = False) -> LanePass:
        """`divide_late`: the losses have the size that their gradients need, and divided by a count would lose it."""
        ...

    def reduced(self, parameters: Sequence[Parameter]) -> Reduced:
        """What an update of these is to see of their gradients, after `finish`."""
        ...

    def after_update(self, parameters: Sequence[Parameter]) -> None:
        """An update of these was made, on this rank as far as it has them."""
        ...

    def travel(self, *, timed: bool) -> Travel:
        """`timed`: until the next call, a GPU's messages are timed."""
        ...

    def close(self, *, abandon: bool = False) -> None:
        """`abandon`: the loop was left in the middle, perhaps by a failure; do not wait for other ranks."""
        ...


class WholeParameters:
    """Of engines that leave every rank with all gradients, so that all ranks make the same update."""

    can_replay = True

    def reduced(self, parameters: Sequence[Parameter]) -> Reduced:
        return WholeGradients(parameters)

    def after_update(self, parameters: Sequence[Parameter]) -> None:
        pass

    def travel(self, *, timed: bool) -> Travel:  # noqa: ARG002
        return Travel()


class BackwardPasses:
    """The backward passes of the open lane: usually one; if there are several, all but the last are announced."""

    def __init__(self) -> None:
        self.open_lane()

    def open_lane(self) -> None:
        self.count = 0
        self._is_complete = False

    def add(self, num_terms: int, *, more: bool) -> bool:
        """Note another one; is it the lane's only one?"""
        if self._is_complete:
            raise UserError("a second backward pass in one lane: say more=True in all but the lane's last")
        is_only = not more and self.count == 0
        if num_terms > 1 and not is_only:
            raise UserError("a loss of several terms takes one backward pass in a lane: leave more=True away")
        self.count += 1
        self._is_complete = not more
        return is_only

    def close_lane(self) -> None:
        if self.count and not self._is_complete:
            raise UserError("the lane's last backward pass said more=True, but none followed")


def all_parameters(models: Sequence[nn.Module]) -> list[Parameter]:
    """Each once, where models share some."""
    return list(dict.fromkeys(parameter for model in models for parameter in model.parameters()))


def inputs_for(parameters: Sequence[Parameter], among: Sequence[Parameter]) -> Sequence[Parameter] | None:
    """What to name to autograd, so that it leaves the gradients of the others alone.

    None where there are no others that take gradients: to be given every parameter makes autograd slower.
    """
    if len(parameters) == len(among) or len(parameters) == sum(parameter.requires_grad for parameter in among):
        return None
    return parameters


def require_no_gradients(parameters: Sequence[Parameter]) -> None:
    """Only `step.backward` may leave any during a pass over the lanes."""
    for parameter in parameters:
        if parameter.grad is not None:
            raise UserError("a lane called .backward() itself: call step.backward(loss_sum, count) instead")


def run_backward(
    losses: Sequence[Tensor],
    scales: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    inputs: Sequence[Parameter] | None = None,
) -> None:
    """The backward pass of losses that are scaled, each by a tensor of its own shape.

    Straight to autograd's engine: what `torch.autograd.backward` asks of its arguments first is known here, and takes a
    tenth of a small model's backward pass. Losses of other types may have a backward pass of their own.
    """
    if set(map(type, losses)) == {Tensor}:
        _engine_run_backward(
            tuple(losses),
            tuple(scales),
            retain_graph,
            False,  # create_graph
            () if inputs is None else tuple(inputs),
            allow_unreachable=True,
            accumulate_grad=True,
        )
    else:
        torch.autograd.backward(losses, scales, retain_graph=retain_graph, inputs=inputs)
