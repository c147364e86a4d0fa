"""`Step`: forward and backward over this rank's lanes, then the update that all ranks make together."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.data.lanes import GlobalBatch
from lockstep.engine.engine import Engine
from lockstep.engine.lane_buffers import BufferSlot
from lockstep.engine.loss_table import LossCount, Term, Terms, as_terms
from lockstep.engine.stand_in_gradient import ShardedGradient
from lockstep.errors import UserError
from lockstep.supervision import heartbeat
from lockstep.supervision.heartbeat import Phase
from lockstep.train.first_step_checks import FirstPassChecks, FirstStepChecks
from lockstep.train.optim.mixed_precision import MixedPrecision
from lockstep.train.optim.nonfinite import Investigator, LaneGradients
from lockstep.train.optim.optimizer_update import Updater
from lockstep.train.pending_pass import Loss, PendingPass, SavedBuffer
from lockstep.train.resume.progress import StepBoundaries
from lockstep.train.step_timer import StepTimer
from lockstep.train.train_state import Models
from lockstep.world.determinism import raise_for_missing_kernel
from lockstep.world.keyed_random import derive_key, preserve_rng_states, seed_rngs


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
    gradients: Callable[[Sequence[Parameter]], dict[str, Tensor]]  # by name, as the optimizers see them
    optimizer_ids: frozenset[int]  # of the run's optimizers
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

    Between the two, `.grad` holds the gradients over all lanes of all ranks, the same on every rank: clip or read them
    there, if `Run(clip_norm=…)` and `step.grad_norm` are not enough. Two models with an optimizer each (a GAN) are two
    such pairs in one step. A step that is to make no update says so by `skip()`.

    Attributes:
        number: counts updates, from 1.
        batch: the global batch, as the loader made it.
        weight: the weights of the current lane's samples, if the loader pads (`tail="pad"`).
        is_updated: an update was made in this step.
        was_skipped: the latest update was skipped, because a loss or a gradient was not finite.
    """

    def __init__(
        self,
        number: int,
        batch: GlobalBatch,
        context: StepContext,
        boundaries: StepBoundaries,
        checks: FirstStepChecks | None = None,
    ) -> None:
        self.number = number
        self.batch = batch
        self.weight: Tensor | None = None
        self.is_updated = False
        self.was_skipped = False
        self._context = context
        self._boundaries = boundaries
        self._checks = checks
        self._passes: list[PendingPass] = []
        self._num_passes = 0
        self._open: PendingPass | None = None
        self._open_checks: FirstPassChecks | None = None
        self._last_passes: list[PendingPass] = []  # of the latest update
        self._grad_norm: Tensor | None = None
        self._is_handled = False  # the script has called `update` or `skip`

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
        if not parameters:
            raise UserError(
                "nothing to train: all parameters of the model are frozen (requires_grad=False): unfreeze some of them"
            )
        scaler = self._context.updater.scaler
        engine = self._context.engine
        lane_pass = engine.start_pass(parameters, divide_late=scaler is not None)
        pending = PendingPass(engine, lane_pass, parameters, number)
        if scaler is not None:
            pending.factor, pending.factor_value = scaler.factor, scaler.factor_value
        pending.loss_function, pending.model = loss, model
        if self._context.updater.may_skip:
            pending.buffers = [SavedBuffer.capture(slot) for slot in self._context.buffers]
        checks = None if self._checks is None else self._checks.begin_pass(parameters)
        for lane, data, size, weight in self.batch.lanes:
            lane_pass.open_lane(lane, size)
            if data is not None:
                self._open_lane(number, lane, weight)
                self._open, self._open_checks = pending, checks
                if checks is not None:
                    checks.open_lane(data)
                try:
                    with self._context.precision.autocast:
                        yield data
                finally:  # also where the loop is left by `break`
                    self._open = self._open_checks = None
                    if checks is not None:
                        checks.close_lane()
            lane_pass.close_lane()
        if self._context.update_key is not None:
            # Random numbers drawn between here and the next lanes are the same on all ranks.
            seed_rngs(derive_key(self._context.update_key, _lane_index(self.batch.number, number)))
        lane_pass.end()
        self._finish(pending)
        if checks is not None:
            checks.end_pass(None if loss is None or model is None else partial(self._first_loss, loss, model, pending))

    def _finish(self, pending: PendingPass) -> None:
        """Wait until the gradients of a pass are there."""
        self._context.timer.lap("compute")
        heartbeat.enter(Phase.EXCHANGING)
        pending.finish()
        if self._context.engine.hides_gradients:
            for parameter in pending.parameters:
                parameter.grad = ShardedGradient(parameter)
        self._passes.append(pending)
        self._context.timer.lap("exchange")
        heartbeat.enter(Phase.COMPUTING)

    def accumulate(self, loss: Loss, model: Models) -> None:
        """Run `loss(model, batch)` and its backward pass over each of this rank's lanes.

        Args:
            loss: returns a sum and a count, or several by name: `{"ce": (sum, n), "kl": (sum, m)}`. With `tail="pad"`
                it is called as `loss(model, batch, weight=…)`.
            model: the prepared model, or several, whose gradients are accumulated.
        """
        if _has_parameters(loss) and not isinstance(model, Sequence) and not _has_parameters(model):
            raise UserError("step.accumulate(model, loss): the loss comes first, step.accumulate(loss, model)")
        if _is_of_torch(loss):
            name = type(loss).__name__ if isinstance(loss, nn.Module) else loss.__name__
            raise UserError(
                f"{name} takes outputs and labels: write a function loss(model, batch) that calls it and returns a sum "
                "and a count"
            )
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
        terms = as_terms(loss)
        if self._open_checks is not None:
            self._open_checks.check_loss(terms)
        with self._context.precision.no_autocast:
            self._open.lane_pass.backward(self._open.scaled(terms), more=more, retain_graph=retain_graph)
        if self._open_checks is not None and not more:
            self._open_checks.after_backward()

    @property
    def grad_norm(self) -> Tensor:
        """The global norm of the gradients, before clipping, in double precision; the same on every rank.

        Between `accumulate` and `update` it is the norm of what the update will use; then, of what the latest update
        has used. Without `clip_norm` it is computed here, so read it before `update` if gradients are sharded, or if
        your optimizer changes them in place.
        """
        if self._passes or self._grad_norm is None:
            parameters = self._pending_parameters()
            norm = self._context.engine.reduced(parameters).norm()
            if self._passes:
                return norm
            self._grad_norm = norm
        return self._grad_norm

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients over all lanes of all ranks, by parameter name, between `accumulate` and `update`.

        They are the tensors that the update will use: change them in place if you like, in the same way on every rank.
        With sharded gradients, each is this rank's part.
        """
        return self._context.gradients(self._pending_parameters())

    def skip(self) -> None:
        """Let the step end without an update: its batch counts as used. All ranks must call it together."""
        self._is_handled = True
        self._remove_stand_ins([parameter for each in self._passes for parameter in each.parameters])
        self._passes = []

    def check_end(self) -> None:
        """Raise if the script has ended the step without using its batch, or all of its gradients."""
        if self._is_handled and not self._passes:
            return
        problem = "with gradients that no update has used" if self._passes else "without an update"
        raise UserError(
            f"step {self.number} ended {problem}: call step.update(optimizer) in every step, or step.skip(); to "
            "accumulate gradients over several batches, make global_batch larger and cut it into more lanes"
        )

    def update(self, *optimizers: Optimizer) -> None:
        """Clip the gradients, if the run clips, step these optimizers, move EMAs and schedules.

        Several optimizers of one model belong in one call. You need no `zero_grad()`: a step starts without gradients.

        Args:
            optimizers: what `run.optimizer(…)` returned.
        """
        self._check_optimizers(optimizers)
        self._is_handled = True
        passes = self._passes if len(self._passes) == 1 else self._passes_of(optimizers)
        if not passes:
            raise UserError(
                "step.update() without gradients: run step.accumulate(…), or all of step.lanes, before it; "
                "several optimizers of one model go into one update"
            )
        parameters = [parameter for each in passes for parameter in each.parameters]
        _require_gradients(optimizers, parameters)
        self._remove_stand_ins(parameters)
        if parameters[0].grad is None and not self._context.engine.hides_gradients and _were_removed(passes):
            raise UserError("the gradients were removed before step.update(…): omit zero_grad(), a step needs none")
        self._context.timer.lap("compute")
        heartbeat.enter(Phase.UPDATING)
        self._passes = [each for each in self._passes if each not in passes]
        self._last_passes = passes
        update = self._context.updater.apply(
            self.number,
            parameters,
            self._context.engine,
            lambda: [loss_sum for each in passes for loss_sum in each.lane_pass.loss_sums()],
            optimizers,
        )
        self._context.timer.lap("update")
        self._grad_norm = update.norm
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
        if not self._last_passes:
            raise UserError("step.loss is known after step.update(…)")
        return self._last_passes[-1].loss()

    def _remove_stand_ins(self, parameters: Sequence[Parameter]) -> None:
        if self._context.engine.hides_gradients:
            for parameter in parameters:
                parameter.grad = None

    def _pending_parameters(self) -> list[Parameter]:
        """Return the parameters whose gradients wait for an update, or else were used by the latest one."""
        passes = self._passes or self._last_passes
        if not passes:
            raise UserError("gradients are known after step.accumulate(…), or after the loop over step.lanes")
        if not self._passes and self._context.engine.hides_gradients:
            raise UserError(
                "sharded gradients end with the update: read them, or step.grad_norm, before step.update(…)"
            )
        return [parameter for each in passes for parameter in each.parameters]

    def _check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        if not optimizers:
            raise UserError("step.update() updates nothing: give it the optimizers, step.update(optimizer)")
        for optimizer in optimizers:
            if id(optimizer) not in self._context.optimizer_ids:
                raise UserError(
                    f"step.update({type(optimizer).__name__}): the run does not know it, so no checkpoint would hold "
                    "its state: call optimizer = run.optimizer(model, optimizer) before run.steps(…)"
                )

    def _investigate(self, passes: Sequence[PendingPass], parameters: Sequence[Parameter]) -> None:
        """Report what was not finite in these passes, and raise if the run is to stop."""
        for each in passes:
            if self._context.engine.can_replay and each.loss_function is not None and each.model is not None:
                each.replay = partial(self._replay, each.loss_function, each.model, each)
        with preserve_rng_states(cuda=True):  # each rank may run its lanes again
            self._context.investigator.report(self.number, passes, self._context.engine.reduced(parameters))

    def _first_loss(self, loss: Loss, model: Models, pending: PendingPass) -> tuple[Any, Terms]:
        """Compute the loss of this rank's first lane once more; return its data and its terms."""
        lane, data, _, weight = next(each for each in self.batch.lanes if each.data is not None)
        self._open_lane(pending.number, lane, weight)
        with self._context.precision.autocast:
            return data, as_terms(self._loss_of(loss, model, data))

    def _passes_of(self, optimizers: Sequence[Optimizer]) -> list[PendingPass]:
        """Return the pending passes that have gradients for these optimizers."""
        parameters = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
        return [each for each in self._passes if not parameters.isdisjoint(each.parameters)]

    def _open_lane(self, number: int, lane: int, weight: Tensor | None) -> None:
        seed_rngs(derive_key(self._context.lane_key, _lane_index(self.batch.number, number, lane)))
        self.weight = weight

    def _loss_of(self, loss: Loss, model: Models, data: Any) -> Term | Terms:
        try:
            return loss(model, data) if self.weight is None else self._weighted(loss, model, data)
        except RuntimeError as error:
            raise_for_missing_kernel(error)
            raise

    def _replay(self, loss: Loss, model: Models, pending: PendingPass) -> Iterator[LaneGradients]:
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


def _lane_index(batch: int, number: int, lane: int = 0) -> int:
    """Return one number for a lane of a pass over a batch: up to 2⁸ passes and 2²⁰ lanes."""
    return batch << 28 | number << 20 | lane


def _has_parameters(value: Any) -> bool:
    return isinstance(value, nn.Module) and next(value.parameters(), None) is not None


def _is_of_torch(loss: Loss) -> bool:
    """Return whether this is one of torch's own loss functions, or a module with one."""
    owner = type(loss) if isinstance(loss, nn.Module) else loss
    return getattr(owner, "__module__", None) in ("torch.nn.functional", "torch.nn.modules.loss")


def _were_removed(passes: Sequence[PendingPass]) -> bool:
    """Return whether these passes had gradients, and none is left."""
    return any(each.has_gradients for each in passes) and all(
        p.grad is None for each in passes for p in each.parameters
    )


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
