"""Collectives on tensors (all_reduce, broadcast, …) that also work in a single process, without `if distributed:`.

They use torch's default process group, or the `group` you pass; without a process group this is a world of one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.errors import UserError

Operation = Literal["sum", "mean", "min", "max", "product"]

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no average: divide afterwards
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of processes; 1 without a process group."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def is_main_process() -> bool:
    """Is this rank 0, the one that prints, logs and writes?"""
    return get_rank() == 0


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Wait until every process of the group has called this. Default: all processes."""
    if get_world_size(group) > 1:
        dist.barrier(group)


def all_reduce(tensor: Tensor, op: Operation = "sum", group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce `tensor` over all processes, in place, and return it. Every process gets the result.

    Args:
        tensor: the tensor to reduce, of the same shape on every process.
        op: "sum", "mean", "min", "max" or "product"; "mean" needs a floating-point or complex tensor.
        group: the process group; the default one if omitted.
    """
    if op not in _REDUCE_OPS:
        raise UserError(f"op={op!r}: expected one of {', '.join(_REDUCE_OPS)}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise UserError(
            f"op='mean' of a {tensor.dtype} tensor would be truncated to integers: convert it to float first"
        )
    if get_world_size(group) > 1:
        dist.all_reduce(tensor, _REDUCE_OPS[op], group)
        if op == "mean":
            tensor /= get_world_size(group)
    return tensor


def reduce_tensor(tensor: Tensor, op: Operation = "mean", group: dist.ProcessGroup | None = None) -> Tensor:
    """Return a reduced copy of `tensor`, by default its mean over all processes; `tensor` itself is not changed.

    Args:
        tensor: the tensor to reduce, of the same shape on every process.
        op: "sum", "mean", "min", "max" or "product"; "mean" needs a floating-point or complex tensor.
        group: the process group; the default one if omitted.
    """
    return all_reduce(tensor.detach().clone(), op, group)


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return every process's tensor in rank order, on every process.

    Args:
        tensor: this process's tensor, of the same shape on every process.
        group: the process group; the default one if omitted.
    """
    if get_world_size(group) == 1:
        return [tensor.detach().clone()]
    gathered = [torch.empty_like(tensor) for _ in range(get_world_size(group))]
    dist.all_gather(gathered, tensor.detach().contiguous(), group)
    return gathered


def gather(tensor: Tensor, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[Tensor] | None:
    """Return every process's tensor in rank order on rank `dst`, and None on the others.

    Args:
        tensor: this process's tensor, of the same shape on every process.
        dst: the rank that receives.
        group: the process group; the default one if omitted.
    """
    _check_peer("dst", dst, group)
    if get_world_size(group) == 1:
        return [tensor.detach().clone()]
    receives = get_rank(group) == dst
    gathered = [torch.empty_like(tensor) for _ in range(get_world_size(group))] if receives else None
    dist.gather(tensor.detach().contiguous(), gathered, dst, group)
    return gathered


def broadcast(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """Overwrite `tensor` with that of rank `src`, in place, and return it.

    Args:
        tensor: the tensor to send or to overwrite, of the same shape on every process.
        src: the rank that sends.
        group: the process group; the default one if omitted.
    """
    _check_peer("src", src, group)
    if get_world_size(group) > 1:
        dist.broadcast(tensor, src, group)
    return tensor


def scatter(
    output: Tensor, parts: Sequence[Tensor] | None = None, src: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Fill `output` with this rank's element of the `parts` on rank `src`, in place, and return it.

    Args:
        output: where this rank's part is written.
        parts: one tensor per process, on rank `src`; ignored on the others.
        src: the rank that sends.
        group: the process group; the default one if omitted.
    """
    _check_peer("src", src, group)
    if get_rank(group) == src:
        if parts is None or len(parts) != get_world_size(group):
            raise UserError(
                f"scatter needs one part per process: expected {get_world_size(group)}, got {len(parts or ())}"
            )
        if get_world_size(group) == 1:
            return output.copy_(parts[0])
    dist.scatter(output, list(parts) if parts is not None and get_rank(group) == src else None, src, group)
    return output


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate gradients without reducing them, if `model` is a DDP or FSDP module; do nothing otherwise."""
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()  # type: ignore[operator]


def _check_peer(name: str, rank: int, group: dist.ProcessGroup | None) -> None:
    if not 0 <= rank < get_world_size(group):
        raise UserError(f"{name}={rank}: expected a rank from 0 to {get_world_size(group) - 1}")
