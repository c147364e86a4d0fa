"""Collectives that also work with one process: code that uses them needs no `if distributed:`.

They act on torch's default process group (or the `group` given); without one, this process is the whole world.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

Operation = Literal["sum", "mean", "min", "max", "product"]

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no average: divide afterwards
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def is_main_process() -> bool:
    """Rank 0: the one that prints, logs and writes."""
    return get_rank() == 0


def barrier(group: dist.ProcessGroup | None = None) -> None:
    """Return once every process has called this."""
    if get_world_size(group) > 1:
        dist.barrier(group)


def all_reduce(tensor: Tensor, op: Operation = "sum", group: dist.ProcessGroup | None = None) -> Tensor:
    """Combine `tensor` over all processes, in place; every process gets the result, which is also returned."""
    if op not in _REDUCE_OPS:
        raise ValueError(f"op={op!r}: expected one of {', '.join(_REDUCE_OPS)}")
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"op='mean' of a {tensor.dtype} tensor would be cut to whole numbers: convert it first")
    if get_world_size(group) > 1:
        dist.all_reduce(tensor, _REDUCE_OPS[op], group)
        if op == "mean":
            tensor /= get_world_size(group)
    return tensor


def reduce_tensor(tensor: Tensor, op: Operation = "mean", group: dist.ProcessGroup | None = None) -> Tensor:
    """The reduced copy of `tensor`, by default its mean over all processes; `tensor` itself is left alone."""
    return all_reduce(tensor.detach().clone(), op, group)


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Every process's `tensor` (all of one shape), in rank order, on every process."""
    if get_world_size(group) == 1:
        return [tensor.detach().clone()]
    gathered = [torch.empty_like(tensor) for _ in range(get_world_size(group))]
    dist.all_gather(gathered, tensor.detach().contiguous(), group)
    return gathered


def gather(tensor: Tensor, dst: int = 0, group: dist.ProcessGroup | None = None) -> list[Tensor] | None:
    """Every process's `tensor` in rank order on `dst`; None elsewhere."""
    _check_peer("dst", dst, group)
    if get_world_size(group) == 1:
        return [tensor.detach().clone()]
    receives = get_rank(group) == dst
    gathered = [torch.empty_like(tensor) for _ in range(get_world_size(group))] if receives else None
    dist.gather(tensor.detach().contiguous(), gathered, dst, group)
    return gathered


def broadcast(tensor: Tensor, src: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """Overwrite `tensor` with `src`'s, in place; also returned."""
    _check_peer("src", src, group)
    if get_world_size(group) > 1:
        dist.broadcast(tensor, src, group)
    return tensor


def scatter(
    output: Tensor, parts: Sequence[Tensor] | None = None, src: int = 0, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Fill `output` with this rank's element of `src`'s `parts`, in place; also returned. Others pass no parts."""
    _check_peer("src", src, group)
    if get_rank(group) == src:
        if parts is None or len(parts) != get_world_size(group):
            raise ValueError(f"scatter needs one part per process: {get_world_size(group)}, not {len(parts or ())}")
        if get_world_size(group) == 1:
            return output.copy_(parts[0])
    dist.scatter(output, list(parts) if parts is not None and get_rank(group) == src else None, src, group)
    return output


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Accumulate gradients without exchanging them, where the model exchanges any; else do nothing."""
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()  # type: ignore[operator]


def _check_peer(name: str, rank: int, group: dist.ProcessGroup | None) -> None:
    if not 0 <= rank < get_world_size(group):
        raise ValueError(f"{name}={rank}: ranks go from 0 to {get_world_size(group) - 1}")
