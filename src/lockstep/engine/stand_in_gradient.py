"""Stand-ins for gradients that are not in `.grad`: using one in any way is an error that says where the gradient is.

Without them, `clip_grad_norm_` would find no gradient, and do nothing without a word.
"""

from typing import Any, ClassVar, NoReturn, Self, cast

from torch import Tensor
from torch.nn import Parameter

from lockstep.engine.torch_internals import make_without_values
from lockstep.errors import UserError


class _StandInGradient(Tensor):
    """Has a parameter's shape, and no values."""

    problem: ClassVar[str]

    @staticmethod
    def __new__(cls, parameter: Parameter) -> Self:
        return cast(Self, make_without_values(cls, parameter))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise UserError(cls.problem)

    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


class GradientInsideLanes(_StandInGradient):
    """In `.grad` between a lane's backward pass and the next lane."""

    problem = (
        "inside the loop over step.lanes, gradients are not complete: call step.backward(…) in place of "
        "loss.backward(), and clip or read gradients after the loop, before step.update(optimizer)"
    )


class ShardedGradient(_StandInGradient):
    """In `.grad` from the end of the lanes to the update, where every rank keeps a part of each gradient."""

    problem = (
        "the gradients are sharded over the ranks, so no parameter has its own: clip by Run(…, clip_norm=…), and read "
        "step.grad_norm or step.gradients()"
    )
