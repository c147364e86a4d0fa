"""The update: check that gradients are finite, clip them, step the optimizers, move the EMAs.

It sees only the gradients over all lanes of all ranks, so every rank makes the same update without communicating.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.engine.engine import Engine, ReducedGradients
from lockstep.engine.gradient_math import all_finite, scale_to_norm
from lockstep.train.optim.ema import ExponentialMovingAverage
from lockstep.train.optim.lr_schedule import Factor, set_rates
from lockstep.train.optim.mixed_precision import LossScaler
from lockstep.train.optim.nonfinite import NonFiniteError
from lockstep.train.step_options import StepOptions
from lockstep.train.strategies.parallel_strategy import ParallelStrategy

_MAX_SKIPPED = 100  # updates in a row


class Update(NamedTuple):
    """Whether an update was made, and if not, why."""

    is_made: bool
    norm: Tensor | None = None  # of the gradients before clipping, where they are clipped
    is_overflow: bool = False  # not made, because the fp16 loss scale was too large


class Updater:
    """Makes the updates of one run."""

    def __init__(
        self,
        options: StepOptions,
        scaler: LossScaler | None,
        rates: Mapping[Optimizer, Factor],
        averages: Sequence[ExponentialMovingAverage],
        strategy: ParallelStrategy,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        """`before_update` is called before any weight changes."""
        self.scaler = scaler
        self._strategy = strategy
        self._clip_norm = options.clip_norm
        self._checks_finite = options.on_nonfinite != "ignore" or scaler is not None
        self.may_skip = options.on_nonfinite == "skip" or scaler is not None
        self._rates = rates
        self._averages = averages
        self._before_update = before_update
        self._skipped_in_a_row = 0
        self.is_stepping = False  # the optimizers, now

    def apply(
        self,
        number: int,
        parameters: Sequence[Parameter],
        engine: Engine,
        loss_sums: Callable[[], Sequence[Tensor]],
        optimizers: Sequence[Optimizer],
    ) -> Update:
        """Make update `number`, unless its loss or gradients are not finite. `engine` has the gradients."""
        reduced = engine.reduced(parameters) if self._checks_finite or self._clip_norm is not None else None
        norm = None if self._clip_norm is None or reduced is None else reduced.norm()
        if self._checks_finite and reduced is not None and not _is_finite(reduced, norm, loss_sums()):
            return self._skip(number, norm)
        self._skipped_in_a_row = 0
        self._before_update()
        if norm is not None and reduced is not None and self._clip_norm is not None:
            scale_to_norm(reduced.gradients, norm, self._clip_norm)
        self.is_stepping = True
        try:
            for optimizer in optimizers:
                if optimizer in self._rates:
                    set_rates(optimizer, self._rates[optimizer](number - 1))
                self._strategy.step(optimizer)
        finally:
            self.is_stepping = False
        engine.after_update(parameters)
        if self._averages:
            moved = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
            for average in self._averages:
                if average.follows(moved):
                    average.update()
        if self.scaler is not None:
            self.scaler.grow()
        return Update(True, norm)

    def _skip(self, number: int, norm: Tensor | None) -> Update:
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row > _MAX_SKIPPED:
            raise NonFiniteError(
                f"step {number}: {_MAX_SKIPPED} updates in a row were skipped because the loss or the gradients were "
                "not finite: a lower learning rate, warm-up or clip_norm may help"
            )
        if self.scaler is not None and self.scaler.can_shrink:
            self.scaler.shrink()
            return Update(False, norm, is_overflow=True)
        return Update(False, norm)


def _is_finite(reduced: ReducedGradients, norm: Tensor | None, loss_sums: Sequence[Tensor]) -> bool:
    if norm is None:
        return reduced.all_finite(loss_sums)
    return all_finite([*loss_sums, norm])  # a norm is finite only if all that went into it is
