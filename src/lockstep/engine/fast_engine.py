"""`determinism: fast`: torch's DistributedDataParallel, synchronising in the last lane only.

The same samples and the same normalisation as in lockstep mode; sums are taken in whatever order is fastest, so the
bits may follow the number of ranks.

[Note: guessed count] The count over all ranks is known after the lanes have been run, and to divide the gradients then
is one pass over all of them more than a hand-written loop has, which divides its losses. So losses are divided by the
count of the pass before, which all ranks know, and the gradients are set right only where it was another one.

[Note: several terms] With several terms, each has a count of its own, and those of all ranks are known in a rank's last
lane at the earliest. Until then every term has gradients of its own: a backward pass for each term in each earlier
lane, and as many gradient buffers. In the last lane one backward pass of all terms is enough, but it waits for the
other ranks' counts before it begins.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lockstep.data.lanes import Lanes
from lockstep.engine.engine import BackwardPasses, all_parameters, inputs_for, run_backward
from lockstep.engine.gradients import Gradients, add_gradients, scale_gradients
from lockstep.engine.requests import Requests
from lockstep.engine.table import LaneTable, Terms
from lockstep.errors import UserError
from lockstep.world.collectives import broadcast
from lockstep.world.world import World

_PRECISE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class FastEngine:
    def __init__(
        self,
        world: World,
        lanes: Lanes,
        models: Sequence[nn.Module],
        *,
        find_unused_parameters: bool = False,
        requests: Requests | None = None,
    ) -> None:
        self.world = world
        self.requests = Requests() if requests is None else requests
        self.lanes = lanes
        self.last_lane = lanes.of(world.rank)[-1]
        self._models = models
        self._all_parameters = all_parameters(models)
        self._find_unused_parameters = find_unused_parameters
        self._replicas: dict[tuple[int, ...], _Replicas] = {}

    def start_pass(self, parameters: Sequence[Parameter], *, divide_late: bool = False) -> "FastPass":
        key = tuple(map(id, parameters))
        if key not in self._replicas:
            self._replicas[key] = _Replicas(parameters, self.world, self._find_unused_parameters)
        replicas = self._replicas[key]
        guess = None if divide_late else replicas.last_factor
        return FastPass(self, parameters, inputs_for(parameters, self._all_parameters), replicas, guess)

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
        self,
        engine: FastEngine,
        parameters: Sequence[Parameter],
        inputs: Sequence[Parameter] | None,
        replicas: "_Replicas",
        guess: Tensor | None,
    ) -> None:
        self._engine = engine
        self._parameters = parameters
        self._inputs = inputs
        self._replicas = replicas
        self._guess = guess  # what the losses are multiplied with already
        self._table = LaneTable(engine.lanes.count, engine.world.device)
        self._rows: Tensor | None = None  # of the table, on their way to the other ranks
        self._work: dist.Work | None = None
        self._by_term: list[Gradients] = []  # where there are several, until all counts are known
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
        self._table.record(self._lane, terms)
        losses = [loss_sum for loss_sum, _ in terms.values()]
        guess = self._guess if len(losses) == 1 else None
        if not more and self._lane == self._engine.last_lane:
            self._backward(self._synchronising(losses), guess, retain_graph)
        elif len(losses) == 1:
            self._backward(losses[0], guess, retain_graph)
        else:
            self._backward_by_term(losses, retain_graph)

    def close_lane(self) -> None:
        self._passes.close_lane()

    def end(self) -> None:
        if not self._is_shared:  # the last lane was empty: take part all the same
            nothing = torch.stack([(parameter * 0).sum() for parameter in self._parameters]).sum()
            self._backward(self._synchronising([nothing]), None, False)

    def finish(self) -> None:
        self._await_counts()
        if not self._table.num_terms:
            raise UserError("no lane had a loss: call step.backward(…) in at least one")
        self._engine.share_buffers()
        if self._rows is not None and self._rows.is_cpu:  # reading it would make a GPU wait, in every step
            self._table.check_names()
        if self._table.num_terms == 1:
            self._divide_by_count()

    def loss(self) -> Tensor:
        return self._table.loss()

    def loss_sums(self) -> list[Tensor]:
        return self._table.loss_sums()

    def nonfinite_lanes(self) -> list[int]:
        return self._table.nonfinite_lanes()

    def _divide_by_count(self) -> None:
        """[Note: guessed count] Unless the losses have been divided by it."""
        factor = self._factor(0)
        if self._guess is None or self._guess != factor:
            gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            scale_gradients(gradients, factor if self._guess is None else factor / self._guess)
        self._replicas.remember(factor)

    def _backward(self, loss_sum: Tensor, scale: Tensor | None, retain_graph: bool) -> None:
        scales = [torch.ones_like(loss_sum) if scale is None else scale.to(loss_sum).expand_as(loss_sum)]
        run_backward([loss_sum], scales, retain_graph=retain_graph, inputs=self._inputs)

    def _backward_by_term(self, losses: Sequence[Tensor], retain_graph: bool) -> None:
        """[Note: several terms] Terms take turns on `.grad`, where autograd adds to what a term has so far."""
        self._by_term = self._by_term or [[None] * len(self._parameters) for _ in losses]
        for number, loss_sum in enumerate(losses):
            self._put(self._by_term[number])
            self._backward(loss_sum, None, retain_graph or number < len(losses) - 1)
            self._by_term[number] = [parameter.grad for parameter in self._parameters]

    def _synchronising(self, losses: Sequence[Tensor]) -> Tensor:
        """All counts of this rank are known here: ask for the other ranks', to wait for them when they are needed."""
        if self._engine.world.size > 1:
            self._rows = self._table.local(self._engine.requests.pass_on())
            self._work = dist.all_reduce(self._rows, async_op=True)
        self._is_shared = True
        if len(self._table.names) <= 1:
            return self._replicas.synchronising(losses[0])
        self._await_counts()
        self._put_scaled_sum()
        if len(losses) == 1:  # the last lane was empty
            return self._replicas.synchronising(losses[0])
        scaled = [loss_sum.reshape(()) * self._factor(term).to(loss_sum) for term, loss_sum in enumerate(losses)]
        return self._replicas.synchronising(torch.stack(scaled).sum())

    def _put_scaled_sum(self) -> None:
        """The gradients of the earlier lanes, each term's over its count, for the last backward pass to add to."""
        total: Gradients = [None] * len(self._parameters)
        for term, gradients in enumerate(self._by_term):
            scale_gradients([gradient for gradient in gradients if gradient is not None], self._factor(term))
            total = add_gradients(total, gradients)
        self._by_term = []
        self._put(total)

    def _put(self, gradients: Gradients) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _await_counts(self) -> None:
        if self._work is not None and self._rows is not None:
            self._work.wait()
            self._table.complete(self._rows)
            self._engine.requests.hear(self._table.asked)
            self._work = None

    def _factor(self, term: int) -> Tensor:
        """What makes of a term's losses, averaged over ranks, the sum over its count."""
        return self._table.scale(term) * self._engine.world.size


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
        self.last_factor: Tensor | None = None  # what the losses of the latest pass had to be multiplied with
        # A GPU would have to be waited for to know whether it is the same again. A backward pass in less than single
        # precision would round it.
        self._remembers = world.device.type == "cpu" and all(p.dtype in _PRECISE for p in parameters)
        self._ddp: nn.Module = _Outside(parameters)
        if world.size > 1:
            self._ddp = DistributedDataParallel(
                self._ddp,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
            )

    def synchronising(self, loss_sum: Tensor) -> Tensor:
        """The same loss; its backward pass leaves the gradients averaged over all ranks."""
        shared: Tensor = self._ddp(loss_sum)
        return shared

    def remember(self, factor: Tensor) -> None:
        if self._remembers:
            self.last_factor = factor
