"""The engine of `determinism: fast`: DistributedDataParallel reduces the gradients in the last lane.

The samples and the normalization are those of lockstep mode. Sums are taken in whatever order is fastest, so the bits
may depend on the number of ranks.

[Note: guessed count] The count over all ranks is known after the lanes have been run. Dividing the gradients then costs
one pass over all of them more than a hand-written loop, which divides its losses. So losses are divided by the count of
the previous pass, which all ranks know, and the gradients are corrected only if the count has changed.

[Note: several terms] Each term of a loss has its own count, and the counts of all ranks are known in a rank's last lane
at the earliest. Until then the terms' gradients are kept apart, which takes a backward pass for each term in each
earlier lane, and a set of gradients for each term. In the last lane one backward pass of all terms is enough, but it
first waits for the other ranks' counts.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.data.lanes import Lanes
from lockstep.engine.compiled_models import named_parameters
from lockstep.engine.compression import Compressor, Correction
from lockstep.engine.ddp_reducer import GradientReducer, parameters_in_graph
from lockstep.engine.engine import BackwardCounter, ReplicatedParameters, all_parameters, backward_inputs, run_backward
from lockstep.engine.gradient_tree import Gradients
from lockstep.engine.loss_table import ControlFlags, LossTable, Terms
from lockstep.errors import UserError
from lockstep.world.collectives import broadcast
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

_MAX_NAMES = 5  # of parameters in a message


class TableRows(NamedTuple):
    """The rows of the loss table that this rank's lanes are written to: lane n to row `first` + n, of `total`."""

    first: int
    total: int


class FastEngine(ReplicatedParameters):
    """Runs lanes backward one after another and reduces their gradients once, in the last lane."""

    def __init__(
        self,
        world: World,
        lanes: Lanes,
        models: Sequence[nn.Module],
        *,
        make_reducer: Callable[[Sequence[Parameter]], GradientReducer],
        control_flags: ControlFlags | None = None,
        compressor: Compressor | None = None,
        uneven: bool = False,
        rank: int | None = None,
        rows: TableRows | None = None,
    ) -> None:
        """Create the engine.

        Args:
            world: this rank, and how many there are.
            lanes: the lanes of each rank.
            models: the models whose parameters and buffers are trained.
            make_reducer: makes what reduces the gradients of some parameters; called once for each set of parameters.
            control_flags: what ranks request of all ranks; sent with every step.
            compressor: compresses the gradients that the reducers send; closed with the engine.
            uneven: a rank may run out of samples before the others do.
            rank: the rank whose lanes are run here. Default: this rank.
            rows: where the lanes are in the loss table. Default: lane n is in row n.
        """
        self.world = world
        self.uneven = uneven
        self.control_flags = ControlFlags() if control_flags is None else control_flags
        self.lanes = lanes
        self.last_lane = lanes.of(world.rank if rank is None else rank)[-1]
        self.rows = TableRows(0, lanes.count) if rows is None else rows
        self.all_parameters = all_parameters(models)
        self._models = models
        self._compressor = compressor
        self._make_reducer = make_reducer
        self._reducers: dict[tuple[int, ...], GradientReducer] = {}

    def start_pass(self, parameters: Sequence[Parameter], *, divide_late: bool = False) -> "FastPass":
        reducer = self._reducer_of(parameters)
        guess = None if divide_late else reducer.last_scale
        return FastPass(self, parameters, backward_inputs(parameters, self.all_parameters), reducer, guess)

    def close(self, *, abandon: bool = False) -> None:
        self._reducers = {}
        if self._compressor is not None:
            self._compressor.close(abandon=abandon)

    def names_of(self, parameters: Iterable[Parameter]) -> str:
        """Return the names of the first few parameters, and how many more there are."""
        known = {parameter: name for model in self._models for name, parameter in named_parameters(model)}
        names = [known.get(parameter, "(unnamed)") for parameter in parameters]
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        return ", ".join(names[:_MAX_NAMES]) + more

    def broadcast_buffers(self, source: int = 0) -> None:
        """Give all ranks one rank's buffers, as DistributedDataParallel does; here after a step's last forward pass."""
        if self.world.size == 1:
            return
        for dtype in (torch.float32, torch.float64, torch.int64):  # those of batch norm; other dtypes stay local
            buffers = [b for model in self._models for b in model.buffers() if b.dtype == dtype]
            if buffers:
                flat = broadcast(torch.cat([buffer.reshape(-1) for buffer in buffers]), source)
                for buffer, part in zip(buffers, torch.split(flat, [b.numel() for b in buffers]), strict=True):
                    buffer.copy_(part.view_as(buffer))

    def _reducer_of(self, parameters: Sequence[Parameter]) -> GradientReducer:
        key = tuple(map(id, parameters))
        if key not in self._reducers:
            self._reducers[key] = self._make_reducer(parameters)
        return self._reducers[key]


class FastPass:
    """One pass over this rank's lanes: gradients accumulate in `.grad`, and the last backward pass reduces them."""

    def __init__(
        self,
        engine: FastEngine,
        parameters: Sequence[Parameter],
        inputs: Sequence[Parameter] | None,
        reducer: GradientReducer,
        guess: Tensor | None,
    ) -> None:
        """`inputs`: what backward passes are restricted to; `guess`: what the losses are scaled by in advance."""
        self._engine = engine
        self._parameters = parameters
        self._inputs = inputs
        self._reducer = reducer
        self._guess = guess
        self._table = LossTable(engine.rows.total, engine.world.device)
        self._shared_rows: Tensor | None = None  # the table while it is being summed over the ranks
        self._work: dist.Work | None = None
        self._by_term: list[Gradients] = []  # [Note: several terms]
        self.is_reduced = False
        self._backwards = BackwardCounter()
        for parameter in parameters:
            parameter.grad = None

    @property
    def has_loss(self) -> bool:
        """Whether a lane of this rank has had a loss yet."""
        return bool(self._table.names)

    def open_lane(self, lane: int, size: int) -> None:
        self._lane = lane
        self._backwards.open_lane()
        self._row = self._engine.rows.first + lane
        self._table.add_lane(self._row, size)

    def backward(self, terms: Terms, *, more: bool, retain_graph: bool = False) -> None:
        self._backwards.add(len(terms), more=more)
        self._table.record(self._row, terms)
        losses = [loss_sum for loss_sum, _ in terms.values()]
        guess = self._guess if len(losses) == 1 else None
        if not more and self._lane == self._engine.last_lane:
            self._backward_and_reduce(losses, guess, retain_graph)
            if not self._reducer.has_reduced_all:
                self._raise_unused(losses)
        elif len(losses) == 1:
            self._backward(losses[0], guess, retain_graph)
        else:
            self._backward_by_term(losses, retain_graph)

    def close_lane(self) -> None:
        self._backwards.close_lane()

    def end(self) -> None:
        if not self.is_reduced:  # the last lane was empty: take part in the reduction all the same
            zero = torch.stack([(parameter * 0).sum() for parameter in self._parameters_of_empty_lane()]).sum()
            self._backward_and_reduce([zero], None, False)

    def finish(self) -> None:
        self._wait_for_counts()
        if not self._table.num_terms:
            raise UserError("no lane had a loss: call step.backward(…) in at least one")
        self._table.check_counts()
        self._engine.broadcast_buffers(self._first_rank_with_samples() if self._engine.uneven else 0)
        if self._shared_rows is not None and self._shared_rows.is_cpu:  # on a GPU the host would wait, in every step
            self._table.check_names()
        if self._table.num_terms == 1 and self._reducer.compressor is None:  # a compressor divides: `_correction`
            self._divide_by_count()
        if self._reducer.find_unused_parameters:
            self._note_unused()

    def loss(self) -> Tensor:
        return self._table.loss()

    def loss_sums(self) -> list[Tensor]:
        return self._table.loss_sums()

    def nonfinite_lanes(self) -> list[int]:
        return sorted({row % self._engine.lanes.count for row in self._table.nonfinite_lanes()})

    def _divide_by_count(self) -> None:
        """Divide the gradients, unless the losses were divided by the same count. [Note: guessed count]"""
        scale = self._scale_of(0)
        if self._guess is None or self._guess != scale:
            self._reducer.scale(self._parameters, scale if self._guess is None else scale / self._guess)
        self._reducer.remember_scale(scale)

    def _backward(self, loss_sum: Tensor, scale: Tensor | None, retain_graph: bool) -> None:
        scales = [torch.ones_like(loss_sum) if scale is None else scale.to(loss_sum).expand_as(loss_sum)]
        run_backward([loss_sum], scales, retain_graph=retain_graph, inputs=self._inputs)

    def _backward_and_reduce(self, losses: Sequence[Tensor], scale: Tensor | None, retain_graph: bool) -> None:
        """Run this rank's last backward pass, which averages the gradients over all ranks."""
        self._backward(self._loss_to_reduce(losses), scale, retain_graph)
        if self._reducer.compressor is not None:
            self._reducer.compressor.check()

    def _backward_by_term(self, losses: Sequence[Tensor], retain_graph: bool) -> None:
        """Let the terms take turns on `.grad`, where autograd adds to each term's sum. [Note: several terms]"""
        self._reducer.before_term()
        self._by_term = self._by_term or [[None] * len(self._parameters) for _ in losses]
        for number, loss_sum in enumerate(losses):
            self._set_gradients(self._by_term[number])
            self._backward(loss_sum, None, retain_graph or number < len(losses) - 1)
            self._by_term[number] = [parameter.grad for parameter in self._parameters]

    def _loss_to_reduce(self, losses: Sequence[Tensor]) -> Tensor:
        """Start to sum the counts over the ranks, and return the loss whose backward pass reduces the gradients."""
        if self._engine.world.size > 1:
            self._shared_rows = self._table.local(self._engine.control_flags.take_own())
            self._work = dist.all_reduce(self._shared_rows, async_op=True)
        self.is_reduced = True
        if len(self._table.names) <= 1:
            return self._reducer.wrap_loss(losses[0], self._correction())
        self._wait_for_counts()
        if self._by_term:
            scales = [self._scale_of(term) for term in range(len(self._by_term))]
            self._set_gradients(self._reducer.sum_terms(self._by_term, scales))
            self._by_term = []
        if len(losses) == 1:  # the last lane was empty
            return self._reducer.wrap_loss(losses[0])
        scaled = [loss_sum.reshape(()) * self._scale_of(term).to(loss_sum) for term, loss_sum in enumerate(losses)]
        return self._reducer.wrap_loss(torch.stack(scaled).sum())

    def _set_gradients(self, gradients: Gradients) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient

    def _wait_for_counts(self) -> None:
        if self._work is not None and self._shared_rows is not None:
            self._work.wait()
            self._table.complete(self._shared_rows)
            self._engine.control_flags.receive(self._table.flags)
            self._work = None

    def _correction(self) -> Correction | None:
        """Return a function for the factor that turns gradients into those of the mean loss; None without compression.

        A compressor adds the error of one gradient to the next, whose count may differ, so it needs gradients of the
        mean loss. Their factor is known when the other ranks' counts have arrived.
        """
        table, rows, work = self._table, self._shared_rows, self._work
        if self._reducer.compressor is None or rows is None or work is None:
            return None

        def correction() -> Tensor:
            work.wait()
            table.complete(rows)
            return self._scale_of(0)

        return correction

    def _parameters_of_empty_lane(self) -> Sequence[Parameter]:
        """Return what an empty lane computes zero gradients for: all, unless unused parameters are allowed.

        Then it is those used on this rank or, if there are none, one that some rank uses: no others may count as used.
        """
        if not self._reducer.find_unused_parameters:
            return self._parameters
        unused = set(self._reducer.unused)
        used_here = [parameter for parameter in self._parameters if parameter.grad is not None]
        return used_here or [p for p in self._parameters if p not in unused][:1] or self._parameters[:1]

    def _first_rank_with_samples(self) -> int:
        """Return the first rank whose buffers have been through a forward pass."""
        sizes = self._table.sizes
        return next((rank for rank, own in enumerate(self._engine.lanes.shares) if any(sizes[n] for n in own)), 0)

    def _raise_unused(self, losses: Sequence[Tensor]) -> NoReturn:
        """Name the unused parameters: DistributedDataParallel would fail in the next step, without their names."""
        used = parameters_in_graph(losses)
        unused = [parameter for parameter in self._parameters if id(parameter) not in used or parameter.grad is None]
        raise UserError(
            f"no gradient for {self._engine.names_of(unused)} in the backward pass of rank "
            f"{self._engine.world.rank}'s last lane: let the loss depend on them, freeze them by "
            "requires_grad_(False), or set find_unused_parameters=true"
        )

    def _note_unused(self) -> None:
        """Remember which parameters no rank used, and warn about them once."""
        unused = [parameter for parameter in self._parameters if parameter.grad is None]
        self._reducer.unused = unused
        if unused and self._engine.world.is_main and not self._reducer.has_warned_unused:
            self._reducer.has_warned_unused = True
            logger.warning("no rank used %s: they are not updated", self._engine.names_of(unused))

    def _scale_of(self, term: int) -> Tensor:
        """Return what turns a term's gradients, averaged over ranks, into their sum over the term's count."""
        return self._table.scale(term) * self._engine.world.size
