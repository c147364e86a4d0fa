"""DistributedDataParallel as the gradient reducer of fast mode, without wrapping the model."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lockstep.engine.compression import Compressor, Correction
from lockstep.engine.gradient_math import scale_gradients
from lockstep.engine.gradient_tree import Gradients, add_gradients
from lockstep.engine.torch_internals import has_reduced_every_bucket
from lockstep.world.world import World

_PRECISE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class GradientReducer(Protocol):
    """Averages the gradients of some parameters over all ranks, inside the last backward pass of a pass."""

    last_scale: Tensor | None  # by which the losses of the latest pass had to be multiplied, if known
    compressor: Compressor | None
    find_unused_parameters: bool
    unused: Sequence[Parameter]  # that no rank used in the latest pass
    has_warned_unused: bool

    @property
    def has_reduced_all(self) -> bool:
        """After a backward pass: whether every parameter got a gradient there, so that all of them were reduced."""
        ...

    def wrap_loss(self, loss_sum: Tensor, correction: Correction | None = None) -> Tensor:
        """Return the same loss; its backward pass leaves gradients averaged over all ranks."""
        ...

    def remember_scale(self, scale: Tensor) -> None:
        """Keep the latest pass's scale in `last_scale`, if the next pass may use it."""
        ...

    def before_term(self) -> None:
        """Prepare the backward pass of a single term. [Note: several terms]"""
        ...

    def sum_terms(self, by_term: Sequence[Gradients], scales: Sequence[Tensor]) -> Gradients:
        """Return the sum of each term's gradients times its scale; may use their memory."""
        ...

    def scale(self, parameters: Sequence[Parameter], scale: Tensor) -> None:
        """Multiply the reduced gradients of these parameters, in place."""
        ...


class DdpReducer:
    """DistributedDataParallel that never sees the model: the loss passes through it just before the backward pass.

    That is when DistributedDataParallel prepares to reduce. Until then gradients accumulate as under `no_sync()`.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        world: World,
        *,
        find_unused_parameters: bool = False,
        compressor: Compressor | None = None,
    ) -> None:
        self.compressor = compressor if world.size > 1 else None
        self.find_unused_parameters = find_unused_parameters
        self.unused: Sequence[Parameter] = ()
        self.has_warned_unused = False
        self.last_scale: Tensor | None = None
        self._correction: Correction | None = None
        # On a GPU, comparing a scale with the last one would make the host wait. A backward pass in half precision
        # would round it.
        self._can_remember = world.device.type == "cpu" and all(p.dtype in _PRECISE for p in parameters)
        self._ddp: nn.Module = _ParameterHolder(parameters)
        if world.size > 1:
            self._ddp = DistributedDataParallel(
                self._ddp,
                gradient_as_bucket_view=True,
                find_unused_parameters=find_unused_parameters,
            )
            if compressor is not None:
                compressor.add(parameters)
                self._ddp.register_comm_hook(compressor, self._reduce_compressed)

    def wrap_loss(self, loss_sum: Tensor, correction: Correction | None = None) -> Tensor:
        """Return the same loss; its backward pass leaves gradients averaged over all ranks.

        `correction`: with a compressor, what gradients are multiplied by before they are compressed.
        """
        self._correction = correction
        wrapped: Tensor = self._ddp(loss_sum)
        return wrapped

    @property
    def has_reduced_all(self) -> bool:
        return not isinstance(self._ddp, DistributedDataParallel) or has_reduced_every_bucket(self._ddp)

    def remember_scale(self, scale: Tensor) -> None:
        if self._can_remember:
            self.last_scale = scale

    def before_term(self) -> None:
        pass

    def sum_terms(self, by_term: Sequence[Gradients], scales: Sequence[Tensor]) -> Gradients:
        total: Gradients = [None] * len(by_term[0]) if by_term else []
        for gradients, scale in zip(by_term, scales, strict=True):
            scale_gradients([gradient for gradient in gradients if gradient is not None], scale)
            total = add_gradients(total, gradients)
        return total

    def scale(self, parameters: Sequence[Parameter], scale: Tensor) -> None:
        scale_gradients([parameter.grad for parameter in parameters if parameter.grad is not None], scale)

    def _reduce_compressed(self, compressor: Compressor, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return compressor.average(bucket, self._correction)


class _ParameterHolder(nn.Module):
    """A module with parameters whose forward pass happens elsewhere: it is called with the result."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        self.held = nn.ParameterList(parameters)

    def forward(self, loss_sum: Tensor) -> Tensor:
        return loss_sum


def parameters_in_graph(losses: Sequence[Tensor]) -> set[int]:
    """Return the ids of the parameters that these losses depend on."""
    found: set[int] = set()
    seen: set[Any] = set()
    nodes: list[Any] = [loss_sum.grad_fn for loss_sum in losses]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (leaf := getattr(node, "variable", None)) is not None:
            found.add(id(leaf))
        nodes += [following for following, _ in node.next_functions]
    return found
