"""`Step`: forward and backward over this rank's lanes, then the update that all ranks make together."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.data.lanes import GlobalBatch
from lockstep.engine.engine import Engine, GradientPass
from lockstep.engine.gradient_math import scale_gradients
from lockstep.engine.lane_buffers import BufferSlot
from lockstep.engine.loss_table import LossCount, Term, Terms, as_terms
from lockstep.errors import UserError
from lockstep.supervision import heartbeat
from lockstep.supervision.heartbeat import Phase
from lockstep.train.optim.mixed_precision import MixedPrecision
from lockstep.train.optim.nonfinite import Investigator, LaneGradients, Replay
from lockstep.train.optim.optimizer_update import Updater
from lockstep.train.resume.progress import StepBoundaries
from lockstep.train.step_timer import StepTimer
from lockstep.train.train_state import Models
from lockstep.world.keyed_random import derive_key, preserve_rng_states, seed_rngs

Loss = Callable[..., Term | Terms]
"""`loss(model, batch)` → a sum and a count, or several by name; with `tail="pad"`, `loss(model, batch, weight=…)`."""


class StepContext(NamedTuple):
    """What all steps of one call of `run.steps` share."""

    engine: Engine
    lane_key: int  # the random key of lanes
    update_key: int | None  # the random key of updates; None: with a single lane the stream continues
    precision: MixedPrecision
    updater: Updater
    investigator: Investigator
    timer: StepTimer
    parameters: Callable[[Models | None], list[Parameter]]
    buffers: Sequence[BufferSlot]


class Step:
    """One training step, as `run.steps(…)` yields it.

    A step runs this rank's lanes, one after the other, and ends with an update that all ranks make together:

        for step in run.steps(loader, epochs=10):
            step.accumulate(loss, model)     # forward and backward over this rank's lanes
            step.update(optimizer)           # reduce over all ranks, clip, optimizer step, EMA, schedule

    In place of `accumulate`, you may write the loop over the lanes yourself:

        for batch in step.lanes:
            step.backward(*loss(model, batch))

    Two models with an optimizer each (a GAN) are two such pairs in one step.

    Attributes:
        number: counts updates, from 1.
        batch: the global batch, as the loader made it.
        weight: the weights of the current lane's samples, if the loader pads (`tail="pad"`).
        norm: after `update`, the gradients' norm before clipping, if the run clips.
        is_updated: an update was made in this step.
        was_skipped: the latest update was skipped, because a loss or a gradient was not finite.
    """

    def __init__(self, number: int, batch: GlobalBatch, context: StepContext, boundaries: StepBoundaries) -> None:
        self.number = number
        self.batch = batch
        self.weight: Tensor | None = None
        self.norm: Tensor | None = None
        self.is_updated = False
        self.was_skipped = False
        self._context = context
        self._boundaries = boundaries
        self._passes: list[_PendingPass] = []
        self._num_passes = 0
        self._open: _PendingPass | None = None
        self._last_pass: _PendingPass | None = None

    @property
    def is_begun(self) -> bool:
        """Whether the script has begun to run the step's lanes."""
        return self._num_passes > 0

    @property
    def epoch(self) -> int:
        """The epoch that the step's batch belongs to, from 0."""
        return self.batch.epoch

    @property
    def is_epoch_end(self) -> bool:
        """Whether this is the last step of its epoch.

        A stream has no length, so its next batch is fetched to find out: then all ranks must ask together.
        """
        return self._boundaries.is_epoch_end(self.batch)

    @property
    def is_last(self) -> bool:
        """Whether this is the last step of `run.steps(…)`. Read it after `update`; for streams, see `is_epoch_end`."""
        return self._boundaries.is_last(self.batch, is_updated=self.is_updated)

    def every(self, steps: int) -> bool:
        """Return whether this step's number is a multiple of `steps`."""
        return self.number % steps == 0

    @property
    def lanes(self) -> Iterator[Any]:
        """Iterate over this rank's batches, one for each of its lanes.

        Call `backward` once for each; the gradients of all prepared models are accumulated.
        """
        return self.lanes_of(None)

    def lanes_of(self, model: Models | None) -> Iterator[Any]:
        """Like `lanes`, but accumulate the gradients of this model only, or of these models."""
        return self._run_lanes(model, None)

    def _run_lanes(self, model: Models | None, loss: Loss | None) -> Iterator[Any]:
        """Yield this rank's batches. `loss`: the function that is called with each of them, if it is known."""
        number = self._num_passes
        self._num_passes += 1
        parameters = self._context.parameters(model)
        for earlier in self._passes:
            if not set(earlier.parameters).isdisjoint(parameters):
                raise UserError(
                    "a second pass for the same model before step.update(…) would lose the first gradients: call "
                    "step.update(optimizer) between them, or return both losses as terms of one"
                )
            earlier.finish()  # it leaves the buffers that this pass starts from
        scaler = self._context.updater.scaler
        engine = self._context.engine
        lane_pass = engine.start_pass(parameters, divide_late=scaler is not None)
        pending = _PendingPass(engine, lane_pass, parameters, number)
        if scaler is not None:
            pending.factor, pending.factor_value = scaler.factor, scaler.factor_value
        pending.loss_function, pending.model = loss, model
        if self._context.updater.may_skip:
            pending.buffers = [_SavedBuffer.capture(slot) for slot in self._context.buffers]
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
            # Random numbers drawn between here and the next lanes are the same on all ranks.
            seed_rngs(derive_key(self._context.update_key, _lane_index(self.batch.number, number)))
        lane_pass.end()
        self._passes.append(pending)

    def accumulate(self, loss: Loss, model: Models) -> None:
        """Run `loss(model, batch)` and its backward pass over each of this rank's lanes.

        Args:
            loss: returns a sum and a count, or several by name: `{"ce": (sum, n), "kl": (sum, m)}`. With `tail="pad"`
                it is called as `loss(model, batch, weight=…)`.
            model: the prepared model, or several, whose gradients are accumulated.
        """
        for data in self._run_lanes(model, loss):
            self.backward(self._loss_of(loss, model, data))

    def backward(
        self,
        loss_sum: Tensor | Term | Terms,
        count: LossCount | None = None,
        *,
        more: bool = False,
        retain_graph: bool = False,
    ) -> None:
        """Run the backward pass of one lane's loss, inside `for batch in step.lanes:`.

        Args:
            loss_sum: the sum of the lane's losses, or terms by name, as `accumulate` takes them.
            count: how many losses were summed.
            more: another `backward` follows in the same lane; sums and counts add up.
            retain_graph: as in `Tensor.backward`.
        """
        if self._open is None:
            raise UserError("step.backward() belongs inside `for batch in step.lanes:`")
        loss: Any = loss_sum if count is None else (loss_sum, count)
        with self._context.precision.no_autocast:
            self._open.lane_pass.backward(self._open.scaled(as_terms(loss)), more=more, retain_graph=retain_graph)

    def update(self, *optimizers: Optimizer) -> None:
        """Wait for the sum of all ranks' gradients, clip it, step these optimizers, move EMAs and schedules.

        Several optimizers of one model belong in one call. You need no `zero_grad()`: a step starts without gradients.
        """
        passes = self._passes if len(self._passes) == 1 else self._passes_of(optimizers)
        if not passes:
            raise UserError(
                "step.update() without gradients: run step.accumulate(…), or all of step.lanes, before it; "
                "several optimizers of one model go into one update"
            )
        parameters = [parameter for each in passes for parameter in each.parameters]
        _require_gradients(optimizers, parameters)
        self._context.timer.lap("compute")
        heartbeat.enter(Phase.EXCHANGING)
        # A skipped update restores buffers; a pass that is finished later would overwrite them.
        for each in self._passes if self._context.updater.may_skip else passes:
            each.finish()
        self._context.timer.lap("exchange")
        heartbeat.enter(Phase.UPDATING)
        self._passes = [each for each in self._passes if each not in passes]
        self._last_pass = passes[-1]
        update = self._context.updater.apply(
            self.number,
            parameters,
            self._context.engine,
            lambda: [loss_sum for each in passes for loss_sum in each.lane_pass.loss_sums()],
            optimizers,
        )
        self._context.timer.lap("update")
        self.norm = update.norm
        self.was_skipped = not update.is_made
        self.is_updated |= update.is_made
        if update.is_made:
            return
        if not update.is_overflow:
            self._investigate(passes, parameters)
        for each in reversed(passes):  # a later pass began with the buffers that an earlier one left
            each.restore_buffers()
            for later in self._passes:
                if later.number > each.number:
                    later.inherit_buffers(each.buffers)

    @property
    def loss(self) -> float:
        """The loss of the latest update: its mean over all lanes of all ranks. Reading it waits for the device."""
        return self.loss_tensor.item()

    @property
    def loss_tensor(self) -> Tensor:
        """`loss` as a tensor on the device; reading it does not wait."""
        if self._last_pass is None:
            raise UserError("step.loss is known after step.update(…)")
        return self._last_pass.loss()

    def _investigate(self, passes: Sequence["_PendingPass"], parameters: Sequence[Parameter]) -> None:
        """Report what was not finite in these passes, and raise if the run is to stop."""
        for each in passes:
            if self._context.engine.can_replay and each.loss_function is not None and each.model is not None:
                each.replay = partial(self._replay, each.loss_function, each.model, each)
        with preserve_rng_states(cuda=True):  # each rank may run its lanes again
            self._context.investigator.report(self.number, passes, self._context.engine.reduced(parameters))

    def _passes_of(self, optimizers: Sequence[Optimizer]) -> list["_PendingPass"]:
        """Return the pending passes that have gradients for these optimizers."""
        parameters = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        return [each for each in self._passes if not parameters.isdisjoint(each.parameters)]

    def _open_lane(self, number: int, lane: int, weight: Tensor | None) -> None:
        seed_rngs(derive_key(self._context.lane_key, _lane_index(self.batch.number, number, lane)))
        self.weight = weight

    def _loss_of(self, loss: Loss, model: Models, data: Any) -> Term | Terms:
        return loss(model, data) if self.weight is None else self._weighted(loss, model, data)

    def _replay(self, loss: Loss, model: Models, pending: "_PendingPass") -> Iterator[LaneGradients]:
        """Compute each lane's gradients again: they are the same, because a lane's random numbers are keyed."""
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
                "tail=pad adds samples of weight zero, so the loss must take weights: loss(model, batch, weight)"
            )
        return loss(model, data, weight=self.weight)


class _SavedBuffer(NamedTuple):
    """A buffer before the lanes ran: the tensor and its value, because either may be replaced."""

    slot: BufferSlot
    tensor: Tensor | None
    value: Tensor | None

    @classmethod
    def capture(cls, slot: BufferSlot) -> Self:
        return cls(slot, *(None, None) if slot.is_empty else (slot.tensor, slot.tensor.clone()))

    def restore(self) -> None:
        """Restore it whether or not it has changed: batch norm's kernels do not bump a tensor's version."""
        self.slot.set(self.tensor)
        if self.tensor is not None and self.value is not None:
            self.tensor.copy_(self.value)


@dataclass(eq=False)
class _PendingPass:
    """A pass over the lanes whose gradients no update has used yet."""

    engine: Engine
    lane_pass: GradientPass
    parameters: list[Parameter]
    number: int  # of the passes in this step
    factor: Tensor | None = None  # what fp16 losses were multiplied by; by the update, the scaler's may have changed
    factor_value: float = 1.0  # as a Python number
    loss_function: Loss | None = None  # called with each lane's data, if known
    model: Models | None = None  # which it was called with
    replay: Replay | None = None  # made when needed: it refers back to this object, and reference cycles are freed late
    buffers: list[_SavedBuffer] = field(default_factory=list)
    is_finished: bool = False

    def scaled(self, terms: Terms) -> Terms:
        if self.factor is None:
            return terms
        return {name: (loss_sum.float() * self.factor, count) for name, (loss_sum, count) in terms.items()}

    def finish(self) -> None:
        """Wait for the sum of gradients over all lanes of all ranks, and remove the loss scale from it."""
        if self.is_finished:
            return
        self.lane_pass.finish()
        self.is_finished = True
        if self.factor is not None:
            scale_gradients(self.engine.reduced(self.parameters).gradients, 1.0 / self.factor)

    def inherit_buffers(self, buffers: list[_SavedBuffer]) -> None:
        """Take over the saved buffers of an earlier pass that was undone: undoing this one must restore those."""
        before = {saved.slot: saved for saved in buffers}
        self.buffers = [before.get(saved.slot, saved) for saved in self.buffers]

    def loss(self) -> Tensor:
        return self.lane_pass.loss() / self.factor_value

    def restore_buffers(self) -> None:
        """Undo what the pass did to the buffers: non-finite values may have reached them, too."""
        for saved in self.buffers:
            saved.restore()


def _lane_index(batch: int, number: int, lane: int = 0) -> int:
    """Return one number for a lane of a pass over a batch: up to 2⁸ passes and 2²⁰ lanes."""
    return batch << 28 | number << 20 | lane


def _require_gradients(optimizers: Sequence[Optimizer], parameters: Sequence[Parameter]) -> None:
    """Raise if an optimizer has no gradients in this step: it would use those of an earlier one."""
    for optimizer in optimizers:
        first = next((p for group in optimizer.param_groups for p in group["params"]), None)
        if parameters and first is parameters[0]:
            continue  # the usual case, without building sets
        own = {p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if own and own.isdisjoint(parameters):
            raise UserError(
                f"step.update({type(optimizer).__name__}) without gradients: its parameters are in none of the models "
                "that this step ran lanes for: pass its model to step.accumulate(loss, model)"
            )
