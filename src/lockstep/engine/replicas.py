"""Fast mode's way to all ranks: torch's DistributedDataParallel, for parameters whose model it never sees."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lockstep.engine.compression import Compressor, Correction
from lockstep.world.world import World

_PRECISE = (torch.float32, torch.float64, torch.complex64, torch.complex128)


class _Outside(nn.Module):
    """A module with parameters whose forward pass happens elsewhere: it is called with the result."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        super().__init__()
        self.parameters_outside = nn.ParameterList(parameters)

    def forward(self, loss_sum: Tensor) -> Tensor:
        return loss_sum


class Replicas:
    """DistributedDataParallel that leaves the model as it is: the loss passes through it just before the backward pass.

    That is when it learns that gradients are to be shared, so until then they pile up, as under `no_sync()`.
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
        self.finds_unused = find_unused_parameters
        self.unused: Sequence[Parameter] = ()  # by all ranks, in the latest pass
        self.has_told_unused = False
        self._correction: Correction | None = None
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
            if compressor is not None:
                compressor.add(parameters)
                self._ddp.register_comm_hook(compressor, self._share)

    def synchronising(self, loss_sum: Tensor, correction: Correction | None = None) -> Tensor:
        """The same loss; its backward pass leaves the gradients averaged over all ranks.

        `correction`: with a compressor, what they are to be multiplied with before they are compressed.
        """
        self._correction = correction
        shared: Tensor = self._ddp(loss_sum)
        return shared

    @property
    def is_complete(self) -> bool:
        """After a backward pass: did every parameter get its gradient there, so that all of them were shared?"""
        if isinstance(self._ddp, DistributedDataParallel):
            try:
                self._ddp._check_reducer_finalized()  # type: ignore[no-untyped-call]
            except RuntimeError:
                return False
        return True

    def remember(self, factor: Tensor) -> None:
        if self._remembers:
            self.last_factor = factor

    def _share(self, compressor: Compressor, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        return compressor.share(bucket, self._correction)
