"""The interface of an engine: start a pass, run lanes backward, read the reduced gradients."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.engine.gradient_math import all_finite, global_norm
from lockstep.engine.loss_table import Terms
from lockstep.engine.torch_internals import backward_without_checks
from lockstep.errors import UserError
from lockstep.world.determinism import raise_for_missing_kernel


class GradientPass(Protocol):
    """One pass over this rank's lanes, which ends with the gradients over all lanes in `.grad`."""

    def open_lane(self, lane: int, size: int) -> None:
        """Begin a lane of `size` samples."""
        ...

    def backward(self, terms: Terms, *, more: bool, retain_graph: bool = False) -> None:
        """Run the open lane's backward pass. `more`: another one follows in the same lane."""
        ...

    def close_lane(self) -> None:
        """End the open lane."""
        ...

    def end(self) -> None:
        """Note that all lanes are closed. On several ranks, all gradients have been submitted by then."""
        ...

    def finish(self) -> None:
        """Wait until `.grad` holds the gradients over all lanes of all ranks, divided by the counts."""
        ...

    def loss(self) -> Tensor:
        """Return the loss over all lanes of all ranks. Call it after `finish`."""
        ...

    def loss_sums(self) -> list[Tensor]:
        """Return the loss sums of every lane, in tensors that may be written to. Call it after `finish`."""
        ...

    def nonfinite_lanes(self) -> list[int]:
        """Return the lanes of all ranks whose losses are not finite. Call it after `finish`."""
        ...


class ReducedGradients(Protocol):
    """The gradients that an update uses, after `finish`: all of them, or this rank's part of each.

    Either way, all ranks get the same norm and the same answer to whether everything is finite.
    """

    gradients: list[Tensor]  # on this rank

    def norm(self) -> Tensor:
        """Return the global norm, on every rank."""
        ...

    def all_finite(self, others: Sequence[Tensor]) -> bool:
        """Return whether the gradients of every rank, and these tensors, which every rank has, are all finite."""
        ...

    def nonfinite(self, parameters: Sequence[Parameter]) -> list[bool]:
        """Return for each of these parameters whether its gradient is not finite on any rank."""
        ...


class CommStats(NamedTuple):
    """What this rank has spent on sending gradients and buffers so far."""

    seconds: float | None = None  # with the wait for other ranks; on a GPU, in timed steps only. None: not measured
    num_bytes: int = 0  # sent by this rank


class Engine(Protocol):
    """Computes gradients over all lanes of all ranks, in one of several ways."""

    can_replay: bool  # whether one rank may run its lanes again without the others
    hides_gradients: bool  # whether the ranks hold parts of the gradients, outside the parameters' `.grad`

    def start_pass(self, parameters: Sequence[Parameter], *, divide_late: bool = False) -> GradientPass:
        """Start a pass for the gradients of these parameters.

        `divide_late`: do not divide the losses before the backward pass; a loss scaler has given them the size that
        fp16 gradients need.
        """
        ...

    def reduced(self, parameters: Sequence[Parameter]) -> ReducedGradients:
        """Return the gradients that an update of these parameters uses."""
        ...

    def after_update(self, parameters: Sequence[Parameter]) -> None:
        """Note that this rank has updated its part of these parameters."""
        ...

    def comm_stats(self, *, timed: bool) -> CommStats:
        """Return what communication has cost so far. `timed`: time a GPU's messages until the next call."""
        ...

    def close(self, *, abandon: bool = False) -> None:
        """Release the threads and hooks. `abandon`: training was left early; do not wait for other ranks."""
        ...


class FullGradients:
    """Every rank has all gradients."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]

    def norm(self) -> Tensor:
        return global_norm(self.gradients)

    def all_finite(self, others: Sequence[Tensor]) -> bool:
        return all_finite([*others, *self.gradients])

    def nonfinite(self, parameters: Sequence[Parameter]) -> list[bool]:
        return [parameter.grad is not None and not all_finite([parameter.grad]) for parameter in parameters]


class ReplicatedParameters:
    """Base of the engines that leave all gradients on every rank, so all ranks make the same update."""

    can_replay = True
    hides_gradients = False

    def reduced(self, parameters: Sequence[Parameter]) -> ReducedGradients:
        return FullGradients(parameters)

    def after_update(self, parameters: Sequence[Parameter]) -> None:
        pass

    def comm_stats(self, *, timed: bool) -> CommStats:  # noqa: ARG002
        return CommStats()


class BackwardCounter:
    """Counts the open lane's backward passes: usually one. If there are more, all but the last pass `more=True`."""

    def __init__(self) -> None:
        self.open_lane()

    def open_lane(self) -> None:
        self.count = 0
        self._is_complete = False

    def add(self, num_terms: int, *, more: bool) -> bool:
        """Count another backward pass, and return whether it is the lane's only one."""
        if self._is_complete:
            raise UserError("a second backward pass in one lane: pass more=True to all but the lane's last")
        is_only = not more and self.count == 0
        if num_terms > 1 and not is_only:
            raise UserError("a loss of several terms allows one backward pass in a lane: omit more=True")
        self.count += 1
        self._is_complete = not more
        return is_only

    def close_lane(self) -> None:
        if self.count and not self._is_complete:
            raise UserError("the lane's last backward pass was given more=True, but none followed: omit it there")


def all_parameters(models: Sequence[nn.Module]) -> list[Parameter]:
    """Return the parameters of all models, each once."""
    return list(dict.fromkeys(parameter for model in models for parameter in model.parameters()))


def backward_inputs(
    parameters: Sequence[Parameter], model_parameters: Sequence[Parameter]
) -> Sequence[Parameter] | None:
    """Return the `inputs` that restrict a backward pass to these parameters.

    None if the models have no others that need gradients: autograd is slower when every parameter is named.
    """
    if len(parameters) == len(model_parameters):
        return None
    num_trainable = sum(parameter.requires_grad for parameter in model_parameters)
    return None if len(parameters) == num_trainable else parameters


def require_no_gradients(parameters: Sequence[Parameter]) -> None:
    """Raise if user code has left gradients: during a pass only `step.backward` may."""
    for parameter in parameters:
        if parameter.grad is not None:
            raise UserError("a lane called loss.backward(): call step.backward(loss_sum, count) instead")


def run_backward(
    losses: Sequence[Tensor],
    scales: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    inputs: Sequence[Parameter] | None = None,
) -> None:
    """Run the backward pass of several losses, each multiplied by a scale of its own shape.

    A constant, as a term of the loss may be in some lanes, has no backward pass. Losses of a Tensor subclass go through
    `torch.autograd.backward`, which their class may override.
    """
    if not all(loss.requires_grad for loss in losses):
        kept = [(loss, scale) for loss, scale in zip(losses, scales, strict=True) if loss.requires_grad]
        losses, scales = [loss for loss, _ in kept], [scale for _, scale in kept]
    if not losses:
        return
    run = backward_without_checks if set(map(type, losses)) == {Tensor} else torch.autograd.backward
    try:
        run(losses, scales, retain_graph=retain_graph, inputs=inputs)
    except RuntimeError as error:
        raise_for_missing_kernel(error)
        raise
