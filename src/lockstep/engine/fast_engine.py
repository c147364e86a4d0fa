"""`determinism: fast`: torch's DistributedDataParallel, synchronising in the last lane only.

The same samples and the same normalisation as in lockstep mode; sums are taken in whatever order is fastest, so the
bits may follow the number of ranks.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket  # torch.distributed re-exports it untyped
from torch.futures import Future
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lockstep.data.lanes import Lanes
from lockstep.engine.engine import BackwardPasses
from lockstep.engine.gradients import Scale, scale_gradients
from lockstep.engine.table import LaneTable, Terms
from lockstep.errors import UserError
from lockstep.world.collectives import broadcast
from lockstep.world.world import World


class FastEngine:
    def __init__(
        self, world: World, lanes: Lanes, models: Sequence[nn.Module], *, find_unused_parameters: bool = False
    ) -> None:
        self.world = world
        self.lanes = lanes
        self.last_lane = lanes.of(world.rank)[-1]
        self._models = models
        self._num_parameters = len({parameter for model in models for parameter in model.parameters()})
        self._find_unused_parameters = find_unused_parameters
        self._replicas: dict[tuple[int, ...], _Replicas] = {}

    def start_pass(self, parameters: Sequence[Parameter]) -> "FastPass":
        key = tuple(map(id, parameters))
        if key not in self._replicas:
            self._replicas[key] = _Replicas(parameters, self.world, self._find_unused_parameters)
        return FastPass(self, parameters, self._replicas[key], only_these=len(parameters) < self._num_parameters)

    def close(self, *, abandon: bool = False) -> None:  # noqa: ARG002  (there is nothing that others wait for)
        self._replicas = {}

    def share_buffers(self) -> None:
        """Rank 0's buffers are everybody's, as in DistributedDataParallel; here after a step's last forward pass."""
        if self.world.size == 1:
            return
        for dtype in (torch.float32, torch.int64):  # what batch norm has; others are left to their rank
            buffers = [b for model in self._models for b in model.buffers() if b.dtype == dtype]
            if buffers:
                flat = broadcast(torch.cat([buffer.reshape(-1) for buffer in buffers]))
                for buffer, part in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
                    buffer.copy_(part.view_as(buffer))


class FastPass:
    """One pass over this rank's lanes: gradients pile up in `.grad`, and the last backward pass shares them."""

    def __init__(
        self, engine: FastEngine, parameters: Sequence[Parameter], replicas: "_Replicas", *, only_these: bool
    ) -> None:
        self._engine = engine
        self._parameters = parameters
        self._inputs = parameters if only_these else None
        self._replicas = replicas
        self._table = LaneTable(engine.lanes.count, engine.world.device)
        self._rows: Tensor | None = None  # of the table, on their way to the other ranks
        self._work: dist.Work | None = None
        self._is_shared = False
        self._passes = BackwardPasses()
        for parameter in parameters:
            parameter.grad = None

    def open_lane(self, lane: int, size: int) -> None:
        self._lane = lane
        self._passes.open_lane()
        self._table.add_lane(lane, size)

    def backward(self, terms: Terms, *, more: bool, retain_graph: bool = False) -> None:
        self._passes.add(len(terms), more=more)
        if len(terms) > 1:
            raise UserError("a loss of several terms needs determinism=lockstep: in fast mode add them up")
        self._table.record(self._lane, terms)
        ((loss_sum, _),) = terms.values()
        if not more and self._lane == self._engine.last_lane:
            loss_sum = self._synchronising(loss_sum)
        torch.autograd.backward(loss_sum, retain_graph=retain_graph, inputs=self._inputs)

    def close_lane(self) -> None:
        self._passes.close_lane()

    def end(self) -> None:
        if not self._is_shared:  # the last lane was empty: take part all the same
            nothing = torch.stack([(parameter * 0).sum() for parameter in self._parameters]).sum()
            self._synchronising(nothing).backward()  # type: ignore[no-untyped-call]

    def finish(self) -> None:
        self._engine.share_buffers()
        if self._engine.world.size == 1:
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            scale_gradients(gradients, self._scale())

    def loss(self) -> Tensor:
        return self._table.loss()

    def loss_sums(self) -> list[Tensor]:
        return self._table.loss_sums()

    def nonfinite_lanes(self) -> list[int]:
        return self._table.nonfinite_lanes()

    def _synchronising(self, loss_sum: Tensor) -> Tensor:
        """All counts of this rank are known here: ask for the other ranks', to wait for them when they are needed."""
        if self._engine.world.size > 1:
            self._rows = self._table.local()
            self._work = dist.all_reduce(self._rows, async_op=True)
        self._is_shared = True
        return self._replicas.synchronising(loss_sum, self._scale)

    def _scale(self) -> Tensor:
        if self._work is not None and self._rows is not None:
            self._work.wait()
            self._table.complete(self._rows)
            self._work = None
        return self._table.scale(0)


class _Outside(nn.Module):
    """A module with parameters whose forward pass happens elsewhere: it is called with the result."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        self.parameters_outside = nn.ParameterList(parameters)

    def forward(self, loss_sum: Tensor) -> Tensor:
        return loss_sum


class _Replicas:
    """DistributedDataParallel that leaves the model as it is: the loss passes through it just before the backward pass.

    That is when it learns that gradients are to be shared, so until then they pile up, as under `no_sync()`.
    """

    def __init__(self, parameters: Sequence[Parameter], world: World, find_unused_parameters: bool) -> None:
        self._scale: Scale | None = None
        self._ddp: nn.Module = _Outside(parameters)
        if world.size > 1:
            ddp = DistributedDataParallel(
                self._ddp,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
            )
            ddp.register_comm_hook(None, self._scale_and_sum)
            self._ddp = ddp

    def synchronising(self, loss_sum: Tensor, scale: Scale) -> Tensor:
        """The same loss; its backward pass leaves the gradients scaled and summed over all ranks."""
        self._scale = scale
        shared: Tensor = self._ddp(loss_sum)
        return shared

    def _scale_and_sum(self, _state: object, bucket: GradBucket) -> Future[Tensor]:
        assert self._scale is not None
        flat = bucket.buffer()
        scale_gradients([flat], self._scale())
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        summed: Future[Tensor] = work.get_future().then(lambda future: future.value()[0])
        return summed
