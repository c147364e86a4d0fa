"""Fast mode for models that are spread over a mesh of ranks: `fully_shard` shares gradients, not DDP. [Note: mesh]

Parameters are DTensors. Their gradients pile up whole on each rank, out of sight, until the last lane's backward pass
sums them over the ranks and leaves each its own part in `.grad`. Forward and backward passes contain collectives, so
all ranks run equally many.

Ranks that share out single layers (axis `tensor`) run the same lanes. Each reports them in rows of the table of its
own: so sums and counts are both larger by the same factor, which is also that of all ranks to those with own lanes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.data.lanes import Lanes
from lockstep.engine.compression import Compressor, Correction
from lockstep.engine.fast_engine import FastEngine, FastPass
from lockstep.engine.finite import all_finite
from lockstep.engine.gradients import Gradients
from lockstep.engine.norm import block_squares
from lockstep.engine.reduced import Reduced
from lockstep.engine.requests import Requests
from lockstep.engine.scaling import scale_gradients
from lockstep.errors import UserError
from lockstep.world.boxes import box_of, held, is_spread
from lockstep.world.collectives import all_reduce
from lockstep.world.world import World


class Unit(NamedTuple):
    """A module whose parameters are gathered and shared together."""

    module: Any  # as `fully_shard` has left it
    parameters: frozenset[Parameter]  # less those of units inside


class Place(NamedTuple):
    """Of a rank among those that have lanes of their own, and among those that run the same ones."""

    rank: int
    copy: int
    num_copies: int


class MeshEngine(FastEngine):
    can_replay = False  # a lane that one rank alone runs again would wait for the others

    def __init__(
        self,
        world: World,
        lanes: Lanes,
        models: Sequence[nn.Module],
        units: Sequence[Unit],
        place: Place,
        *,
        requests: Requests,
    ) -> None:
        super().__init__(
            world,
            lanes,
            models,
            replicate=self._shared,
            requests=requests,
            rank=place.rank,
        )
        self._units = units
        self.first_row = place.copy * lanes.count
        self.num_rows = place.num_copies * lanes.count
        self.open_pass: MeshPass | None = None

    def start_pass(self, parameters: Sequence[Parameter], *, divide_late: bool = False) -> "MeshPass":  # noqa: ARG002
        if self.open_pass is not None and self.open_pass.is_begun:
            raise UserError(
                "the pass over the lanes before was left early, and under a mesh its gradients stay: run all lanes"
            )
        for unit in self._units:  # an evaluation, or a forward pass of the user's own, may have left it gathered
            unit.module.reshard()
        concerned = set(parameters)
        others = [parameter for parameter in self.all_parameters if parameter not in concerned]
        self.open_pass = MeshPass(self, parameters, others, self._shared(parameters))
        return self.open_pass

    def _shared(self, parameters: Sequence[Parameter]) -> "SharedByUnits":
        return SharedByUnits(parameters, self._units)

    def reduced(self, parameters: Sequence[Parameter]) -> Reduced:
        return BoxesOfGradients(parameters, self.world)


class SharedByUnits:
    """Where `Replicas` have DistributedDataParallel, this has the model's own units."""

    compressor: Compressor | None = None
    finds_unused = False  # torch's units do, without a word

    def __init__(self, parameters: Sequence[Parameter], units: Sequence[Unit]) -> None:
        self.last_factor: Tensor | None = None  # a rank has few of the gradients: to divide those late costs little
        self.unused: Sequence[Parameter] = ()
        self.has_told_unused = False
        self._units = [unit for unit in units if not unit.parameters.isdisjoint(parameters)]

    def pile_up(self) -> None:
        for unit in self._units:
            unit.module.set_requires_gradient_sync(False, recurse=False)

    def share(self) -> None:
        for unit in self._units:
            unit.module.set_requires_gradient_sync(True, recurse=False)

    @property
    def is_complete(self) -> bool:
        return True

    def synchronising(self, loss_sum: Tensor, correction: Correction | None = None) -> Tensor:  # noqa: ARG002
        self.share()
        return loss_sum

    def remember(self, factor: Tensor) -> None:
        pass


class MeshPass(FastPass):
    def __init__(
        self,
        engine: MeshEngine,
        parameters: Sequence[Parameter],
        others: Sequence[Parameter],
        shared: SharedByUnits,
    ) -> None:
        # The parameters that autograd sees are not these, so it cannot be told to leave the others alone.
        super().__init__(engine, parameters, None, shared, None)
        self._engine: MeshEngine = engine
        self._replicas: SharedByUnits = shared
        # Taken away meanwhile: else what this pass leaves there would be added to it.
        self._others = [(parameter, parameter.grad) for parameter in others]
        for parameter in others:
            parameter.grad = None
        shared.pile_up()

    @property
    def is_begun(self) -> bool:
        return bool(self._table.names)

    def end(self) -> None:
        self._engine.open_pass = None
        if not self._is_shared:
            raise UserError("under a mesh every lane needs its backward pass, the last one of a rank in any case")
        for parameter, gradient in self._others:
            parameter.grad = gradient

    def nonfinite_lanes(self) -> list[int]:
        return sorted({row % self._engine.lanes.count for row in super().nonfinite_lanes()})

    def _backward_by_term(self, losses: Sequence[Tensor], retain_graph: bool) -> None:
        self._replicas.share()  # what piles up out of sight cannot be told apart by term
        super()._backward_by_term(losses, retain_graph)

    def _put_scaled_sum(self) -> None:
        total: Gradients = [None] * len(self._parameters)
        for term, gradients in enumerate(self._by_term):
            scale_gradients([held(gradient) for gradient in gradients if gradient is not None], self._factor(term))
            for number, gradient in enumerate(gradients):
                so_far = total[number]
                if so_far is not None and gradient is not None:
                    held(so_far).add_(held(gradient))
                else:
                    total[number] = gradient if so_far is None else so_far
        self._by_term = []
        self._put(total)


class BoxesOfGradients:
    """What an update sees: this rank's boxes, and answers over all of them."""

    def __init__(self, parameters: Sequence[Parameter], world: World) -> None:
        self._world = world
        self._used = [parameter for parameter in parameters if parameter.grad is not None]
        self.gradients = [_held_gradient(parameter) for parameter in self._used]

    def norm(self) -> Tensor:
        """Every box once, however many ranks have it."""
        firsts = [
            block_squares(gradient).sum()
            for parameter, gradient in zip(self._used, self.gradients, strict=True)
            if not is_spread(parameter) or box_of(parameter).is_first
        ]
        device = self._world.device
        total = torch.stack(firsts).sum().to(device) if firsts else torch.zeros((), dtype=torch.float64, device=device)
        norm = all_reduce(total.reshape(1)).sqrt().reshape(())
        return norm.to(self.gradients[0].device) if self.gradients else norm

    def all_finite(self, others: Sequence[Tensor]) -> bool:
        return not any(self._any_rank([not all_finite([*others, *self.gradients])]))

    def nonfinite(self, parameters: Sequence[Parameter]) -> list[bool]:
        gradients = [None if parameter.grad is None else _held_gradient(parameter) for parameter in parameters]
        return self._any_rank([gradient is not None and not all_finite([gradient]) for gradient in gradients])

    def _any_rank(self, flags: list[bool]) -> list[bool]:
        numbers = torch.tensor([float(flag) for flag in flags], device=self._world.device)
        return [bool(number) for number in all_reduce(numbers).tolist()]


def _held_gradient(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return held(parameter.grad)
