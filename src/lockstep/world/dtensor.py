"""DTensors: this rank's shard of one, how it is saved, and how the full tensor is gathered or distributed again.

Several ranks may hold the same shard; then the first of them saves it for all. A DTensor is recognized by its
attributes, because importing `torch.distributed.tensor` takes long and most runs have none.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.tested_versions import TESTED_TORCH
from lockstep.errors import LockstepError
from lockstep.world.collectives import all_reduce
from lockstep.world.serialization import Shard


class LocalShard(NamedTuple):
    """Which slice of a tensor of this shape this rank holds; it may be empty."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]  # of the full tensor
    is_first: bool  # among the ranks that hold the same slice

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of this slice in the full tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))


def is_dtensor(value: Any) -> bool:
    """Is this a DTensor?"""
    return isinstance(value, Tensor) and hasattr(value, "device_mesh")


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; an ordinary tensor unchanged."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return local


def local_shard_of(tensor: Any) -> LocalShard:
    """Which slice of a DTensor this rank holds."""
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    sizes, offsets = _local_sizes_and_offsets(shape, mesh, tensor.placements)
    # A submesh over some axes exists once for each coordinate on the other axes; the first of these has rank 0 in it.
    is_first = bool((mesh.mesh == 0).any()) and all(
        coordinate == 0 or not placement.is_replicate()
        for coordinate, placement in zip(mesh.get_coordinate(), tensor.placements, strict=True)
    )
    return LocalShard(tuple(offsets), tuple(sizes), shape, is_first)


def shard_to_save(local: Tensor, shard: LocalShard) -> Shard:
    """What this rank saves: its slice, or nothing if another rank saves the same one."""
    if not shard.is_first:
        return Shard(local.detach().narrow(0, 0, 0), (0,) * len(shard.shape), shard.shape)
    return Shard(local.detach(), shard.offsets, shard.shape)


def dtensor_to_save(value: Any) -> Any:
    """A DTensor as the shard that this rank saves; any other value unchanged."""
    return shard_to_save(local_tensor(value), local_shard_of(value)) if is_dtensor(value) else value


@torch.no_grad()
def gather_full_tensor(local: Tensor, shard: LocalShard) -> Tensor:
    """The full tensor, on every rank. A collective: all ranks must call it."""
    is_nccl = dist.is_initialized() and dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else local.device
    full = torch.zeros(shard.shape, dtype=local.dtype, device=device)
    if shard.is_first:
        full[shard.slices] = local.to(device)
    # Summed as bytes, to which the other ranks add zeros: summed as floats, -0.0 would become 0.0.
    all_reduce(full.view(-1).view(torch.uint8))
    return full.to(local.device)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor, on every rank (a collective); an ordinary tensor unchanged."""
    return gather_full_tensor(local_tensor(tensor), local_shard_of(tensor)) if is_dtensor(tensor) else tensor


def distribute_like(tensor: Any, full: Tensor) -> Tensor:
    """`full`, distributed over the ranks in the same way as `tensor`; unchanged if `tensor` is not a DTensor."""
    if not is_dtensor(tensor):
        return full
    from torch.distributed.tensor import DTensor

    local = full[local_shard_of(tensor).slices].to(local_tensor(tensor).device)
    distributed: Tensor = DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return distributed


def _local_sizes_and_offsets(
    shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]
) -> tuple[Sequence[int], Sequence[int]]:
    """The sizes and offsets of this rank's slice. torch's own function for it is private (last seen in torch 2.13)."""
    try:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    except ImportError:
        return chunk_sizes_and_offsets(shape, mesh, placements)
    return compute_local_shape_and_global_offset(shape, mesh, placements)


def chunk_sizes_and_offsets(
    shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]
) -> tuple[Sequence[int], Sequence[int]]:
    """The same with public names only: each mesh axis splits the slice of the previous axes, as `torch.chunk` does.

    The strided shards of two-dimensional parallelism are not supported.
    """
    sizes, offsets = list(shape), [0] * len(shape)
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            raise LockstepError(
                f"a DTensor with placement {placement} cannot be saved with torch {torch.__version__}: "
                f"use {TESTED_TORCH}, with which lockstep was tested"
            )
        dim = placement.dim
        chunk = -(-sizes[dim] // mesh.size(axis))
        start = min(chunk * mesh.get_coordinate()[axis], sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return sizes, offsets
