"""Fast mode for models sharded over a device mesh: FSDP reduces the gradients, not DDP. [Note: mesh]

[Note: mesh] Parameters are DTensors. Their gradients accumulate unsharded on each rank, inside FSDP, until the last
lane's backward pass reduce-scatters them and leaves each rank its shard in `.grad`. Forward and backward passes contain
collectives, so all ranks must run equally many.

The T ranks of a tensor group (axis `tensor`) run the same lanes, and each reports them in separate rows of the loss
table. So all sums and counts are T times as large, and their quotient, the loss, is unchanged. FSDP averages gradients
over the W / T ranks with their own samples, so the scale for an average over W ranks is right, too: T cancels out.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.data.lanes import Lanes
from lockstep.engine.compression import Compressor, Correction
from lockstep.engine.engine import CommStats, ReducedGradients
from lockstep.engine.fast_engine import FastEngine, FastPass, TableRows
from lockstep.engine.gradient_math import all_finite, block_squares, scale_gradients
from lockstep.engine.gradient_tree import Gradients
from lockstep.engine.loss_table import ControlFlags, Terms
from lockstep.errors import UserError
from lockstep.world.collectives import all_reduce
from lockstep.world.dtensor import is_dtensor, local_shard_of, local_tensor
from lockstep.world.world import World


class FsdpUnit(NamedTuple):
    """A module whose parameters are gathered and resharded together."""

    module: Any  # as `fully_shard` has left it
    parameters: frozenset[Parameter]  # without those of units inside


class MeshPosition(NamedTuple):
    """A rank's place among the ranks with their own samples, and among those that run the same lanes."""

    rank: int
    copy: int
    num_copies: int


class MeshEngine:
    """A `FastEngine` whose gradients are reduced by FSDP and stay sharded."""

    can_replay = False  # a lane that one rank alone runs again would wait for the others
    hides_gradients = False

    def __init__(
        self,
        world: World,
        lanes: Lanes,
        models: Sequence[nn.Module],
        units: Sequence[FsdpUnit],
        position: MeshPosition,
        *,
        control_flags: ControlFlags,
    ) -> None:
        self._world = world
        self._units = units
        self._fast = FastEngine(
            world,
            lanes,
            models,
            make_reducer=self._make_reducer,
            control_flags=control_flags,
            rank=position.rank,
            rows=TableRows(position.copy * lanes.count, position.num_copies * lanes.count),
        )
        self._open_pass: MeshPass | None = None

    def start_pass(self, parameters: Sequence[Parameter], *, divide_late: bool = False) -> "MeshPass":  # noqa: ARG002
        if self._open_pass is not None and self._open_pass.has_unreduced_gradients:
            raise UserError(
                "the previous pass over the lanes was left early, and its gradients remain inside FSDP: run all lanes"
            )
        for unit in self._units:  # an evaluation, or the user's own forward pass, may have left it gathered
            unit.module.reshard()
        self._open_pass = MeshPass(self._fast, parameters, self._make_reducer(parameters))
        return self._open_pass

    def reduced(self, parameters: Sequence[Parameter]) -> ReducedGradients:
        return DTensorGradients(parameters, self._world)

    def after_update(self, parameters: Sequence[Parameter]) -> None:
        pass

    def comm_stats(self, *, timed: bool) -> CommStats:  # noqa: ARG002
        return CommStats()

    def close(self, *, abandon: bool = False) -> None:
        self._fast.close(abandon=abandon)

    def _make_reducer(self, parameters: Sequence[Parameter]) -> "FsdpReducer":
        return FsdpReducer(parameters, self._units)


class FsdpReducer:
    """Reduces gradients by the model's own FSDP units, as `DdpReducer` does by DistributedDataParallel."""

    compressor: Compressor | None = None
    find_unused_parameters = False  # FSDP allows unused parameters anyway

    def __init__(self, parameters: Sequence[Parameter], units: Sequence[FsdpUnit]) -> None:
        self.last_scale: Tensor | None = None  # shards are small, so dividing them afterwards costs little
        self.unused: Sequence[Parameter] = ()
        self.has_warned_unused = False
        self._units = [unit for unit in units if not unit.parameters.isdisjoint(parameters)]

    def set_gradient_sync(self, is_on: bool) -> None:
        """Let the next backward passes reduce gradients, or accumulate them unsharded."""
        for unit in self._units:
            unit.module.set_requires_gradient_sync(is_on, recurse=False)

    @property
    def has_reduced_all(self) -> bool:
        return True

    def wrap_loss(self, loss_sum: Tensor, correction: Correction | None = None) -> Tensor:  # noqa: ARG002
        self.set_gradient_sync(True)
        return loss_sum

    def remember_scale(self, scale: Tensor) -> None:
        pass

    def before_term(self) -> None:
        self.set_gradient_sync(True)  # what accumulates inside FSDP cannot be separated by term

    def sum_terms(self, by_term: Sequence[Gradients], scales: Sequence[Tensor]) -> Gradients:
        total: Gradients = [None] * len(by_term[0])
        for gradients, scale in zip(by_term, scales, strict=True):
            scale_gradients([local_tensor(gradient) for gradient in gradients if gradient is not None], scale)
            for number, gradient in enumerate(gradients):
                so_far = total[number]
                if so_far is not None and gradient is not None:
                    local_tensor(so_far).add_(local_tensor(gradient))
                else:
                    total[number] = gradient if so_far is None else so_far
        return total

    def scale(self, parameters: Sequence[Parameter], scale: Tensor) -> None:
        scale_gradients([_local_gradient(p) for p in parameters if p.grad is not None], scale)


class MeshPass:
    """A pass that sets the gradients of other parameters aside while FSDP reduces its own. It runs a `FastPass`."""

    def __init__(self, engine: FastEngine, parameters: Sequence[Parameter], reducer: FsdpReducer) -> None:
        # Autograd sees FSDP's unsharded parameters and not these, so `inputs` cannot restrict a backward pass to them.
        self._pass = FastPass(engine, parameters, inputs=None, reducer=reducer, guess=None)
        self._is_ended = False
        own = set(parameters)
        others = [parameter for parameter in engine.all_parameters if parameter not in own]
        # Without this, the gradients of this pass would be added to theirs.
        self._set_aside = [(parameter, parameter.grad) for parameter in others]
        for parameter in others:
            parameter.grad = None
        reducer.set_gradient_sync(False)

    @property
    def has_unreduced_gradients(self) -> bool:
        """Whether lanes were run whose gradients still are inside FSDP."""
        return self._pass.has_loss and not self._is_ended

    def open_lane(self, lane: int, size: int) -> None:
        self._pass.open_lane(lane, size)

    def backward(self, terms: Terms, *, more: bool, retain_graph: bool = False) -> None:
        self._pass.backward(terms, more=more, retain_graph=retain_graph)

    def close_lane(self) -> None:
        self._pass.close_lane()

    def end(self) -> None:
        self._is_ended = True
        if not self._pass.is_reduced:
            raise UserError(
                "no backward pass in this rank's last lane: under a mesh, every rank must call step.backward(…) there"
            )
        for parameter, gradient in self._set_aside:
            parameter.grad = gradient
        self._set_aside = []

    def finish(self) -> None:
        self._pass.finish()

    def loss(self) -> Tensor:
        return self._pass.loss()

    def loss_sums(self) -> list[Tensor]:
        return self._pass.loss_sums()

    def nonfinite_lanes(self) -> list[int]:
        return self._pass.nonfinite_lanes()


class DTensorGradients:
    """The local shards of DTensor gradients; norm and finiteness are computed together with the other ranks."""

    def __init__(self, parameters: Sequence[Parameter], world: World) -> None:
        self._world = world
        self._used = [parameter for parameter in parameters if parameter.grad is not None]
        self.gradients = [_local_gradient(parameter) for parameter in self._used]

    def norm(self) -> Tensor:
        """Return the global norm. Every shard counts once, however many ranks hold it."""
        squares = [
            block_squares(gradient).sum()
            for parameter, gradient in zip(self._used, self.gradients, strict=True)
            if not is_dtensor(parameter) or local_shard_of(parameter).is_first
        ]
        device = self._world.device
        total = (
            torch.stack(squares).sum().to(device) if squares else torch.zeros((), dtype=torch.float64, device=device)
        )
        norm = all_reduce(total.reshape(1)).sqrt().reshape(())
        return norm.to(self.gradients[0].device) if self.gradients else norm

    def all_finite(self, others: Sequence[Tensor]) -> bool:
        return not any(self._on_any_rank([not all_finite([*others, *self.gradients])]))

    def nonfinite(self, parameters: Sequence[Parameter]) -> list[bool]:
        gradients = [None if parameter.grad is None else _local_gradient(parameter) for parameter in parameters]
        return self._on_any_rank([gradient is not None and not all_finite([gradient]) for gradient in gradients])

    def _on_any_rank(self, flags: list[bool]) -> list[bool]:
        numbers = torch.tensor([float(flag) for flag in flags], device=self._world.device)
        return [bool(number) for number in all_reduce(numbers).tolist()]


def _local_gradient(parameter: Parameter) -> Tensor:
    assert parameter.grad is not None
    return local_tensor(parameter.grad)
