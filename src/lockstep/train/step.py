"""One training step: this rank's lanes, the update that all ranks make together, and the loss over all of them."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.data.batch import GlobalBatch
from lockstep.engine.buffers import Slot
from lockstep.engine.engine import Engine, LanePass
from lockstep.engine.scaling import scale_gradients
from lockstep.engine.table import Count, Term, Terms, as_terms
from lockstep.errors import UserError
from lockstep.supervision import pulse
from lockstep.supervision.pulse import Phase
from lockstep.train.nonfinite import Investigator, LaneGradients, Replay
from lockstep.train.parts import Models
from lockstep.train.precision import Precision
from lockstep.train.stopwatch import Stopwatch
from lockstep.train.update import Updater
from lockstep.world.randomness import derived, seed_streams, undisturbed_streams

Loss = Callable[..., Term | Terms]
"""`loss(model, batch)` → a sum and a count, or several by name; with `tail="pad"`, `loss(model, batch, weight=…)`."""


class StepContext(NamedTuple):
    """What all steps of a run have in common."""

    engine: Engine
    lane_key: int  # what a lane draws from, and
    update_key: int | None  # what is drawn after the lanes, start from these; with a single lane it just goes on
    precision: Precision
    updater: Updater
    investigator: Investigator
    stopwatch: Stopwatch
    parameters: Callable[[Models | None], list[Parameter]]
    buffers: Sequence[Slot]


class Step:
    """What `run.steps(…)` yields. A step is one or more passes over its lanes, each ended by an update:

    step.accumulate(loss, model)         # or: for batch in step.lanes: step.backward(*loss(model, batch))
    step.update(optimizer)
    """

    def __init__(self, number: int, batch: GlobalBatch, context: StepContext) -> None:
        self.number = number  # counts updates, from 1
        self.batch = batch
        self.weight: Tensor | None = None  # of the current lane's samples, where the loader pads
        self.norm: Tensor | None = None  # of the gradients before clipping, where they are clipped
        self.is_updated = False  # an update was made
        self.was_skipped = False  # the latest was not: something in it was not finite
        self._context = context
        self._passes: list[_Pending] = []
        self._num_passes = 0
        self._open: _Pending | None = None
        self._last_pass: _Pending | None = None

    @property
    def is_begun(self) -> bool:
        return self._num_passes > 0

    @property
    def epoch(self) -> int:
        return self.batch.epoch

    def every(self, steps: int) -> bool:
        return self.number % steps == 0

    @property
    def lanes(self) -> Iterator[Any]:
        """This rank's batches, for a loop of one's own; `backward` then concerns every prepared model."""
        return self.lanes_of(None)

    def lanes_of(self, model: Models | None) -> Iterator[Any]:
        """The same, for the gradients of one model (or several) alone."""
        return self._run_lanes(model, None)

    def _run_lanes(self, model: Models | None, loss: Loss | None) -> Iterator[Any]:
        """`loss`: what will be called with each lane's data, where that is known."""
        number = self._num_passes
        self._num_passes += 1
        parameters = self._context.parameters(model)
        for earlier in self._passes:
            if not set(earlier.parameters).isdisjoint(parameters):
                raise UserError("a second pass over the same model before step.update(): the first would be lost")
            earlier.finish()  # this one may need the buffers it leaves
        scaler = self._context.updater.scaler
        engine = self._context.engine
        lane_pass = engine.start_pass(parameters, divide_late=scaler is not None)
        pending = _Pending(engine, lane_pass, parameters, number)
        if scaler is not None:
            pending.factor, pending.scale = scaler.factor, scaler.number
        pending.loss_function, pending.model = loss, model
        if self._context.updater.may_skip:
            pending.buffers = [_Kept.now(slot) for slot in self._context.buffers]
        for lane, data, size, weight in self.batch.lanes:
            lane_pass.open_lane(lane, size)
            if data is not None:
                self._open_lane(number, lane, weight)
                self._open = pending
                try:
                    with self._context.precision.autocast:
                        yield data
                finally:  # also where the loop is left by `break`
                    self._open = None
            lane_pass.close_lane()
        if self._context.update_key is not None:
            # What is drawn from here to the next lanes is the same on all ranks, whatever lanes they had.
            seed_streams(derived(self._context.update_key, _place(self.batch.number, number)))
        lane_pass.end()
        self._passes.append(pending)

    def accumulate(self, loss: Loss, model: Models) -> None:
        """Run `loss(model, batch)` and its backward pass over this rank's lanes."""
        for data in self._run_lanes(model, loss):
            self.backward(self._loss_of(loss, model, data))

    def backward(
        self,
        loss_sum: Tensor | Term | Terms,
        count: Count | None = None,
        *,
        more: bool = False,
        retain_graph: bool = False,
    ) -> None:
        """The backward pass of a lane's loss: its sum and its count, or terms by name.

        Several in one lane add up, sums and counts; all but the last say `more=True`.
        """
        if self._open is None:
            raise UserError("step.backward() belongs inside `for batch in step.lanes:`")
        loss: Any = loss_sum if count is None else (loss_sum, count)
        with self._context.precision.as_it_is:
            self._open.lane_pass.backward(self._open.scaled(as_terms(loss)), more=more, retain_graph=retain_graph)

    def update(self, *optimizers: Optimizer) -> None:
        """Wait for all ranks' gradients of the optimizers' parameters, clip them, and let the optimizers step."""
        passes = self._passes if len(self._passes) == 1 else self._passes_of(optimizers)
        if not passes:
            raise UserError(
                "step.update() without gradients: run step.accumulate(…), or all of step.lanes, before it; "
                "several optimizers of one model go into one update"
            )
        parameters = [parameter for each in passes for parameter in each.parameters]
        _require_gradients(optimizers, parameters)
        self._context.stopwatch.lap("compute")
        pulse.enter(Phase.EXCHANGING)
        # A skipped update puts buffers back, and a pass that is finished later would write them once more.
        for each in self._passes if self._context.updater.may_skip else passes:
            each.finish()
        self._context.stopwatch.lap("exchange")
        pulse.enter(Phase.UPDATING)
        self._passes = [each for each in self._passes if each not in passes]
        self._last_pass = passes[-1]
        update = self._context.updater.apply(
            self.number,
            parameters,
            self._context.engine,
            lambda: [loss_sum for each in passes for loss_sum in each.lane_pass.loss_sums()],
            optimizers,
        )
        self._context.stopwatch.lap("update")
        self.norm = update.norm
        self.was_skipped = not update.is_made
        self.is_updated |= update.is_made
        if update.is_made:
            return
        if not update.is_overflow:
            for each in passes:
                if self._context.engine.can_replay and each.loss_function is not None and each.model is not None:
                    each.replay = partial(self._replayed, each.loss_function, each.model, each)
            with undisturbed_streams(cuda=True):  # lanes may be run again there, on each rank its own
                self._context.investigator.report(self.number, passes, self._context.engine.reduced(parameters))
        for each in reversed(passes):  # a later pass has begun with what an earlier one had left
            each.put_buffers_back()
            for later in self._passes:
                if later.number > each.number:
                    later.begin_with(each.buffers)

    @property
    def loss(self) -> float:
        """The loss over all lanes of all ranks, of the latest update; fetched from the device when it is read."""
        return self.loss_tensor.item()

    @property
    def loss_tensor(self) -> Tensor:
        """The same, left where it is: nothing waits for the device."""
        if self._last_pass is None:
            raise UserError("step.loss is known after step.update()")
        return self._last_pass.loss()

    def _passes_of(self, optimizers: Sequence[Optimizer]) -> list["_Pending"]:
        """Those of the pending passes that these optimizers' parameters had a part in."""
        parameters = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        return [each for each in self._passes if not parameters.isdisjoint(each.parameters)]

    def _open_lane(self, number: int, lane: int, weight: Tensor | None) -> None:
        seed_streams(derived(self._context.lane_key, _place(self.batch.number, number, lane)))
        self.weight = weight

    def _loss_of(self, loss: Loss, model: Models, data: Any) -> Term | Terms:
        return loss(model, data) if self.weight is None else self._weighted(loss, model, data)

    def _replayed(self, loss: Loss, model: Models, pending: "_Pending") -> Iterator[LaneGradients]:
        """Each lane's own gradients once more: the same, because all that a lane draws is keyed."""
        for lane, data, _, weight in self.batch.lanes:
            if data is not None:
                self._open_lane(pending.number, lane, weight)
                with self._context.precision.autocast:
                    terms = pending.scaled(as_terms(self._loss_of(loss, model, data)))
                total = torch.stack([loss_sum.reshape(()) for loss_sum, _ in terms.values()]).sum()
                gradients = torch.autograd.grad(total, pending.parameters, allow_unused=True)
                yield LaneGradients(lane, list(zip(pending.parameters, gradients, strict=True)))

    def _weighted(self, loss: Loss, model: Models, data: Any) -> Term | Terms:
        parameters = inspect.signature(loss).parameters
        if "weight" not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            raise UserError(
                "tail=pad gives samples of weight zero, so the loss must take them: loss(model, batch, weight)"
            )
        return loss(model, data, weight=self.weight)


class _Kept(NamedTuple):
    """A buffer as it was before the lanes: the tensor and its value, for either may be another afterwards."""

    slot: Slot
    tensor: Tensor | None
    value: Tensor | None

    @classmethod
    def now(cls, slot: Slot) -> Self:
        return cls(slot, *(None, None) if slot.is_empty else (slot.tensor, slot.tensor.clone()))

    def put_back(self) -> None:
        """Without asking whether it was changed: batch norm changes its statistics and leaves no trace of that."""
        self.slot.module._buffers[self.slot.key] = self.tensor
        if self.tensor is not None and self.value is not None:
            self.tensor.copy_(self.value)


@dataclass(eq=False)
class _Pending:
    """A pass over the lanes whose gradients no update has used yet."""

    engine: Engine
    lane_pass: LanePass
    parameters: list[Parameter]
    number: int  # of the passes in this step
    factor: Tensor | None = None  # what fp16 losses were multiplied with; at the update it may be another already
    scale: float = 1.0  # the same as a number
    loss_function: Loss | None = None  # what was called with each lane's data, and
    model: Models | None = None  # with what, where that is known
    replay: Replay | None = None  # made when it is needed: it refers back to this, and such circles are freed late
    buffers: list[_Kept] = field(default_factory=list)
    is_finished: bool = False

    def scaled(self, terms: Terms) -> Terms:
        if self.factor is None:
            return terms
        return {name: (loss_sum.float() * self.factor, count) for name, (loss_sum, count) in terms.items()}

    def finish(self) -> None:
        """Wait until the gradients over all lanes of all ranks are here, without the loss scale."""
        if self.is_finished:
            return
        self.lane_pass.finish()
        self.is_finished = True
        if self.factor is not None:
            scale_gradients(self.engine.reduced(self.parameters).gradients, 1.0 / self.factor)

    def begin_with(self, buffers: list[_Kept]) -> None:
        """An earlier pass has been taken back: put back what was before that one, if it comes to it."""
        before = {kept.slot: kept for kept in buffers}
        self.buffers = [before.get(kept.slot, kept) for kept in self.buffers]

    def loss(self) -> Tensor:
        return self.lane_pass.loss() / self.scale

    def put_buffers_back(self) -> None:
        """What is not finite may have reached them too."""
        for kept in self.buffers:
            kept.put_back()


def _place(batch: int, number: int, lane: int = 0) -> int:
    """One number for a lane of a pass over a batch: up to 2⁸ passes and 2²⁰ lanes."""
    return batch << 28 | number << 20 | lane


def _require_gradients(optimizers: Sequence[Optimizer], parameters: Sequence[Parameter]) -> None:
    """Else one would step on gradients of an earlier update, or on none."""
    for optimizer in optimizers:
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if parameters and first is parameters[0]:
            continue  # as it is most often
        own = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if own and own.isdisjoint(parameters):
            raise UserError(
                f"step.update({type(optimizer).__name__}) without gradients of its parameters: they are in none of the "
                "models that this step ran its lanes for"
            )
