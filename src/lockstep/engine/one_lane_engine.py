"""The engine for a single lane: one process, nothing to add up; the gradients are autograd's own.

The lane's count is the step's count. So the loss is scaled before its backward pass, which costs one multiplication
instead of a pass over all gradients, and several terms take one backward pass together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.engine.engine import (
    BackwardCounter,
    ReplicatedParameters,
    all_parameters,
    backward_inputs,
    require_no_gradients,
    run_backward,
)
from lockstep.engine.gradient_math import all_finite, scale_gradients
from lockstep.engine.loss_table import LossCount, Terms, as_count, check_count, nonzero
from lockstep.errors import UserError
from lockstep.world.world import World

_MAX_RECIPROCALS = 1024


class OneLaneEngine(ReplicatedParameters):
    """Runs the backward pass of the only lane, with its loss divided by its count."""

    def __init__(self, world: World, models: Sequence[nn.Module]) -> None:
        self.world = world
        self._all_parameters = all_parameters(models)
        self._reciprocals: dict[tuple[float, torch.dtype, int], Tensor] = {}

    def start_pass(self, parameters: Sequence[Parameter], *, divide_late: bool = False) -> "OneLanePass":  # noqa: ARG002
        return OneLanePass(self, parameters, backward_inputs(parameters, self._all_parameters))

    def reciprocal(self, loss_sum: Tensor, count: LossCount) -> Tensor:
        """Return 1 / count, with the loss's shape and dtype. Counts repeat, so the tensors are cached."""
        if isinstance(count, Tensor):
            return nonzero(count.detach().reshape(())).double().reciprocal().to(loss_sum).expand_as(loss_sum)
        key = (count, loss_sum.dtype, loss_sum.dim())
        if key not in self._reciprocals:
            if len(self._reciprocals) >= _MAX_RECIPROCALS:
                self._reciprocals.clear()
            self._reciprocals[key] = loss_sum.new_full(loss_sum.shape, 1.0 / (count or 1))
        return self._reciprocals[key]

    def close(self, *, abandon: bool = False) -> None:
        pass


class OneLanePass:
    """One pass over the only lane."""

    def __init__(
        self, engine: OneLaneEngine, parameters: Sequence[Parameter], inputs: Sequence[Parameter] | None
    ) -> None:
        self._engine = engine
        self._parameters = parameters
        self._inputs = inputs
        self._backwards = BackwardCounter()
        self._names: list[str] = []
        self._sums: list[Tensor] = []
        self._counts: list[LossCount] = []
        for parameter in parameters:
            parameter.grad = None

    def open_lane(self, lane: int, size: int) -> None:
        pass

    def backward(self, terms: Terms, *, more: bool, retain_graph: bool = False) -> None:
        is_only = self._backwards.add(len(terms), more=more)
        if self._backwards.count == 1:
            require_no_gradients(self._parameters)
        losses, scales = [], []
        for name, (loss_sum, count) in terms.items():
            count = count if type(count) is int else as_count(count)
            self._names.append(name)
            self._sums.append(loss_sum.detach())
            self._counts.append(count)
            losses.append(loss_sum)
            # With several backward passes the count is known after the last; `finish` scales the gradients then.
            scales.append(self._engine.reciprocal(loss_sum, count if is_only else 1))
        run_backward(losses, scales, retain_graph=retain_graph, inputs=self._inputs)

    def close_lane(self) -> None:
        self._backwards.close_lane()

    def end(self) -> None:
        if not self._backwards.count:
            require_no_gradients(self._parameters)

    def finish(self) -> None:
        if not self._backwards.count:
            raise UserError("no lane had a loss: call step.backward(…) in at least one")
        if self._backwards.count == 1:
            for number, count in enumerate(self._counts):
                if type(count) is not int or count <= 0:  # rarely
                    check_count(self._names[number], self._sums[number], count)
        else:
            check_count(self._names[0], torch.stack([each.reshape(()) for each in self._sums]).sum(), sum(self._counts))
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            scale_gradients(gradients, 1.0 / self._total_count())

    def loss(self) -> Tensor:
        sums = [loss_sum.double().reshape(()) for loss_sum in self._sums]
        if self._backwards.count > 1:
            return torch.stack(sums).sum() / self._total_count()
        counts = [torch.as_tensor(count, dtype=torch.float64, device=sums[0].device) for count in self._counts]
        return (torch.stack(sums) / nonzero(torch.stack(counts))).sum()

    def loss_sums(self) -> list[Tensor]:
        return [loss_sum.clone() for loss_sum in self._sums]

    def nonfinite_lanes(self) -> list[int]:
        return [] if all_finite(self.loss_sums()) else [0]

    def _total_count(self) -> Tensor:
        total = sum(self._counts)
        return nonzero(torch.as_tensor(total, dtype=torch.float64, device=self._engine.world.device))
