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

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.data.lanes import Lanes
from lockstep.engine.compression import Compressor, Correction
from lockstep.engine.engine import BackwardPasses, WholeParameters, all_parameters, inputs_for, run_backward
from lockstep.engine.gradients import Gradients, add_gradients
from lockstep.engine.requests import Requests
from lockstep.engine.scaling import scale_gradients
from lockstep.engine.table import LaneTable, Terms
from lockstep.errors import UserError
from lockstep.world.collectives import broadcast
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

_MOST_NAMED = 5


class Synchroniser(Protocol):
    """What gradients of some parameters pass through on their way to the other ranks: usually `Replicas`."""

    last_factor: Tensor | None  # what the losses of the latest pass had to be multiplied with, where that is known
    compressor: Compressor | None
    finds_unused: bool
    unused: Sequence[Parameter]  # by all ranks, in the latest pass
    has_told_unused: bool

    @property
    def is_complete(self) -> bool:
        """After a backward pass: did every parameter get its gradient there, so that all of them were shared?"""
        ...

    def synchronising(self, loss_sum: Tensor, correction: Correction | None = None) -> Tensor:
        """The same loss; its backward pass leaves the gradients averaged over all ranks."""
        ...

    def remember(self, factor: Tensor) -> None: ...


class FastEngine(WholeParameters):
    def __init__(
        self,
        world: World,
        lanes: Lanes,
        models: Sequence[nn.Module],
        *,
        replicate: Callable[[Sequence[Parameter]], Synchroniser],
        requests: Requests | None = None,
        compressor: Compressor | None = None,
        uneven: bool = False,
        rank: int | None = None,
    ) -> None:
        """`compressor`: what the replicas share gradients through, if any. `uneven`: a rank may run out of samples
        before the others do. `rank`: whose lanes are run here, where that is not this rank's number."""
        self.world = world
        self.uneven = uneven
        self._compressor = compressor
        self.requests = Requests() if requests is None else requests
        self.lanes = lanes
        self.last_lane = lanes.of(world.rank if rank is None else rank)[-1]
        self.first_row, self.num_rows = 0, lanes.count  # of the table: a lane's row, and all of them
        self._models = models
        self.all_parameters = all_parameters(models)
        self._replicate = replicate
        self._replicas: dict[tuple[int, ...], Synchroniser] = {}

    def start_pass(self, parameters: Sequence[Parameter], *, divide_late: bool = False) -> "FastPass":
        replicas = self.replicas_of(parameters)
        guess = None if divide_late else replicas.last_factor
        return FastPass(self, parameters, inputs_for(parameters, self.all_parameters), replicas, guess)

    def replicas_of(self, parameters: Sequence[Parameter]) -> Synchroniser:
        key = tuple(map(id, parameters))
        if key not in self._replicas:
            self._replicas[key] = self._replicate(parameters)
        return self._replicas[key]

    def close(self, *, abandon: bool = False) -> None:
        self._replicas = {}
        if self._compressor is not None:
            self._compressor.close(abandon=abandon)

    def names_of(self, parameters: Iterable[Parameter]) -> str:
        """The first few of them by name, and how many others there are."""
        known = {parameter: name for model in self._models for name, parameter in model.named_parameters()}
        names = [known.get(parameter, "(unnamed)") for parameter in parameters]
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        return ", ".join(names[:_MOST_NAMED]) + more

    def share_buffers(self, source: int = 0) -> None:
        """One rank's buffers are everybody's, as in DistributedDataParallel; here after a step's last forward pass."""
        if self.world.size == 1:
            return
        for dtype in (torch.float32, torch.float64, torch.int64):  # what batch norm has; others are left to their rank
            buffers = [b for model in self._models for b in model.buffers() if b.dtype == dtype]
            if buffers:
                flat = broadcast(torch.cat([buffer.reshape(-1) for buffer in buffers]), source)
                for buffer, part in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
                    buffer.copy_(part.view_as(buffer))


class FastPass:
    """One pass over this rank's lanes: gradients pile up in `.grad`, and the last backward pass shares them."""

    def __init__(
        self,
        engine: FastEngine,
        parameters: Sequence[Parameter],
        inputs: Sequence[Parameter] | None,
        replicas: Synchroniser,
        guess: Tensor | None,
    ) -> None:
        self._engine = engine
        self._parameters = parameters
        self._inputs = inputs
        self._replicas = replicas
        self._guess = guess  # what the losses are multiplied with already
        self._table = LaneTable(engine.num_rows, engine.world.device)
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
        self._row = self._engine.first_row + lane
        self._table.add_lane(self._row, size)

    def backward(self, terms: Terms, *, more: bool, retain_graph: bool = False) -> None:
        self._passes.add(len(terms), more=more)
        self._table.record(self._row, terms)
        losses = [loss_sum for loss_sum, _ in terms.values()]
        guess = self._guess if len(losses) == 1 else None
        if not more and self._lane == self._engine.last_lane:
            self._backward_of_all(losses, guess, retain_graph)
            if not self._replicas.is_complete:
                self._name_the_unused(losses)
        elif len(losses) == 1:
            self._backward(losses[0], guess, retain_graph)
        else:
            self._backward_by_term(losses, retain_graph)

    def close_lane(self) -> None:
        self._passes.close_lane()

    def end(self) -> None:
        if not self._is_shared:  # the last lane was empty: take part all the same
            nothing = torch.stack([(parameter * 0).sum() for parameter in self._taking_part()]).sum()
            self._backward_of_all([nothing], None, False)

    def finish(self) -> None:
        self._await_counts()
        if not self._table.num_terms:
            raise UserError("no lane had a loss: call step.backward(…) in at least one")
        self._engine.share_buffers(self._first_with_samples() if self._engine.uneven else 0)
        if self._rows is not None and self._rows.is_cpu:  # reading it would make a GPU wait, in every step
            self._table.check_names()
        if self._table.num_terms == 1 and self._replicas.compressor is None:  # which has divided: see `_correction`
            self._divide_by_count()
        if self._replicas.finds_unused:
            self._note_the_unused()

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
            gradients = self._engine.reduced(self._parameters).gradients
            scale_gradients(gradients, factor if self._guess is None else factor / self._guess)
        self._replicas.remember(factor)

    def _backward(self, loss_sum: Tensor, scale: Tensor | None, retain_graph: bool) -> None:
        scales = [torch.ones_like(loss_sum) if scale is None else scale.to(loss_sum).expand_as(loss_sum)]
        run_backward([loss_sum], scales, retain_graph=retain_graph, inputs=self._inputs)

    def _backward_of_all(self, losses: Sequence[Tensor], scale: Tensor | None, retain_graph: bool) -> None:
        """The one that shares the gradients with all ranks."""
        self._backward(self._synchronising(losses), scale, retain_graph)
        if self._replicas.compressor is not None:
            self._replicas.compressor.check()

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
            return self._replicas.synchronising(losses[0], self._correction())
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

    def _correction(self) -> Correction | None:
        """What is compressed must be the gradient of the mean, because what is left out of one is added to the next,
        which may be over another count. It is divided on its way: by then the other ranks' counts are there."""
        table, rows, work = self._table, self._rows, self._work
        if self._replicas.compressor is None or rows is None or work is None:
            return None

        def correction() -> Tensor:
            work.wait()
            table.complete(rows)
            return self._factor(0)

        return correction

    def _taking_part(self) -> Sequence[Parameter]:
        """What an empty lane must have gradients of: all, unless it may leave some out. Then none that nobody uses."""
        if not self._replicas.finds_unused:
            return self._parameters
        unused = set(self._replicas.unused)
        used_here = [parameter for parameter in self._parameters if parameter.grad is not None]
        return used_here or [p for p in self._parameters if p not in unused][:1] or self._parameters[:1]

    def _first_with_samples(self) -> int:
        """Of the ranks: another's buffers have not been through a forward pass."""
        sizes = self._table.sizes
        return next((rank for rank, own in enumerate(self._engine.lanes.shares) if any(sizes[n] for n in own)), 0)

    def _name_the_unused(self, losses: Sequence[Tensor]) -> NoReturn:
        """DistributedDataParallel would fail in the next step, and say less; other ranks would wait until then."""
        used = _leaves_under(losses)
        unused = [parameter for parameter in self._parameters if id(parameter) not in used or parameter.grad is None]
        raise UserError(
            f"no gradient for {self._engine.names_of(unused)} in the backward pass of rank "
            f"{self._engine.world.rank}'s last lane: let the loss depend on them, freeze them by "
            "requires_grad_(False), or set find_unused_parameters=true"
        )

    def _note_the_unused(self) -> None:
        """What no rank has used has no gradient here either. It is told once."""
        unused = [parameter for parameter in self._parameters if parameter.grad is None]
        self._replicas.unused = unused
        if unused and self._engine.world.is_main and not self._replicas.has_told_unused:
            self._replicas.has_told_unused = True
            logger.warning("no rank used %s: they stay as they are", self._engine.names_of(unused))

    def _factor(self, term: int) -> Tensor:
        """What makes of a term's losses, averaged over ranks, the sum over its count."""
        return self._table.scale(term) * self._engine.world.size


def _leaves_under(losses: Sequence[Tensor]) -> set[int]:
    """The ids of what autograd has come to from these losses."""
    found: set[int] = set()
    seen: set[Any] = set()
    waiting: list[Any] = [loss_sum.grad_fn for loss_sum in losses]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        waiting += [following for following, _ in node.next_functions]
    return found
