"""Tensors of which every rank has a box: torch's DTensors. How a box is saved, cut out of a whole, and gathered.

Several ranks may have the same box; then one of them, the first, speaks for it. DTensors are known by what they can do:
to import what they are made of takes long, and most runs have none.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.world.collectives import all_reduce
from lockstep.world.plain_values import Shard


class Box(NamedTuple):
    """This rank's, of a tensor of this shape; it may be empty."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    is_first: bool  # of the ranks that have the same

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


def is_spread(value: Any) -> bool:
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def held(tensor: Tensor) -> Tensor:
    """What is here of it, in its own memory; of an ordinary tensor, all."""
    if not is_spread(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local


def box_of(tensor: Any) -> Box:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, tensor.placements)
    # A mesh over some of the axes is there once for each place on the others; rank 0 is in the first.
    is_first = bool((mesh.mesh == 0).any()) and all(
        place == 0 or not placement.is_replicate()
        for place, placement in zip(mesh.get_coordinate(), tensor.placements, strict=True)
    )
    return Box(tuple(offsets), tuple(sizes), shape, is_first)


def as_shard(local: Tensor, box: Box) -> Shard:
    """What this rank saves; of a box that another rank saves, nothing."""
    if not box.is_first:
        return Shard(local.detach().narrow(0, 0, 0), (0,) * len(box.shape), box.shape)
    return Shard(local.detach(), box.offsets, box.shape)


@torch.no_grad()
def gathered(local: Tensor, box: Box) -> Tensor:
    """The whole, on every rank; all ask together."""
    carrier = torch.device("cuda", torch.cuda.current_device()) if _is_nccl() else local.device
    # As bytes, to which the other ranks add zeros: of numbers, -0.0 would not survive that.
    whole = torch.zeros(box.shape, dtype=local.dtype, device=carrier)
    if box.is_first:
        whole[box.slices] = local.to(carrier)
    all_reduce(whole.view(-1).view(torch.uint8))
    return whole.to(local.device)


def to_save(value: Any) -> Any:
    """A DTensor as this rank's shard; anything else as it is."""
    return as_shard(held(value), box_of(value)) if is_spread(value) else value


def whole_of(tensor: Tensor) -> Tensor:
    """All ranks ask together."""
    return gathered(held(tensor), box_of(tensor)) if is_spread(tensor) else tensor


def lying_like(tensor: Any, whole: Tensor) -> Tensor:
    """This rank's part of a whole, as a tensor that lies on the ranks as the first one does."""
    if not is_spread(tensor):
        return whole
    from torch.distributed.tensor import DTensor

    local = whole[box_of(tensor).slices].to(held(tensor).device)
    made: Tensor = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return made


def _is_nccl() -> bool:
    return dist.is_initialized() and dist.get_backend() == "nccl"
