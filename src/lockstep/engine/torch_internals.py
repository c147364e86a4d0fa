"""Torch's private names that training depends on: an adapter for each, used nowhere else.

Every function says what it relies on. Where torch has a public way to the same bits, that way is the fallback, and a
torch release that drops the private name costs speed only. What has no fallback fails in
`tests/contracts/test_private_names_engine.py`, which names the torch version. Seen in all tested versions of torch.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import graph
from torch.nn import Parameter
from torch.nn.modules import batchnorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.optim import Optimizer

_engine_run_backward: Any = getattr(graph, "_engine_run_backward", None)
_norm_base: Any = getattr(batchnorm, "_NormBase", None)
_batch_norm_base: Any = getattr(batchnorm, "_BatchNorm", None)
_spectral_norm: Any = getattr(parametrizations, "_SpectralNorm", None)

COMPILED_CHILD = "_orig_mod"  # what `torch.compile` calls the original module inside its wrapper

_NORM_CLASSES: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
    nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d,
    nn.LazyInstanceNorm3d,
)

_REDUCTION_MEAN = 1  # as ATen counts: none, mean, sum
_PRODUCTS = frozenset({"MulBackward0", "MulBackward1"})
_NODES_WITH_MEANS = frozenset(  # whose results are means if their inputs are
    {
        "AddBackward0",
        "ClampBackward1",
        "NegBackward0",
        "ReshapeAliasBackward0",
        "RsubBackward1",
        "SqrtBackward0",
        "SqueezeBackward0",
        "SubBackward0",
        "ToCopyBackward0",
        "ViewBackward0",
    }
)


# Autograd: `torch.autograd.graph._engine_run_backward`, `Tensor._version`, `Tensor._values`, nodes' `_saved_…`


def backward_without_checks(
    losses: Sequence[Tensor], scales: Sequence[Tensor], *, retain_graph: bool, inputs: Sequence[Parameter] | None
) -> None:
    """Run `torch.autograd.backward` without its argument checks, which take a tenth of a small model's backward pass.

    Relies on `_engine_run_backward`; falls back to `torch.autograd.backward`, with the same bits.
    """
    if _engine_run_backward is None:
        torch.autograd.backward(losses, scales, retain_graph=retain_graph, inputs=inputs)
        return
    _engine_run_backward(
        tuple(losses),
        tuple(scales),
        retain_graph,
        False,  # create_graph
        () if inputs is None else tuple(inputs),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place. Relies on `Tensor._version`; there is no public name for it."""
    return tensor._version


def stored_values(sparse: Tensor) -> Tensor:
    """Return a sparse tensor's values as stored, duplicates included.

    Relies on `Tensor._values`: the public `values()` needs a coalesced tensor, and coalescing adds duplicates up.
    """
    return sparse._values()


def is_mean(loss: Tensor, count: float) -> bool:
    """Return whether a loss was computed as a mean over `count` losses.

    That is: by a loss function's own reduction, by `mean()`, or by a division by the count. Sums, differences, roots
    and parts of means are means, too; a mean that was multiplied by its count is none, and neither is a sum of `count`
    means, one of each sample. Relies on the names of autograd's nodes and on their `_saved_reduction` and
    `_saved_other`; without them, no loss counts as a mean.
    """
    num_means = 0
    nodes = [loss.grad_fn]
    while nodes and num_means < count:  # not by recursion: a sum made in a loop is as deep as it has terms
        node: Any = nodes.pop()
        if node is None:
            return False
        if _is_reduced_to_mean(node, count):
            num_means += 1
        elif node.name() in _NODES_WITH_MEANS or _is_part(node):
            nodes += [each for each, _ in node.next_functions if each is not None]
        else:
            return False
    return 0 < num_means < count


def _is_reduced_to_mean(node: Any, count: float) -> bool:
    if node.name().startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _REDUCTION_MEAN:
        return True
    return node.name() == "DivBackward0" and _number_of(node) == count


def _is_part(node: Any) -> bool:
    """Return whether a node multiplies by at most one, or divides by at least one. An integer factor is a count."""
    number = _number_of(node)
    if number is None:
        return False
    if node.name() == "DivBackward0":
        return abs(number) >= 1
    return node.name() in _PRODUCTS and isinstance(number, float) and abs(number) <= 1


def _number_of(node: Any) -> float | None:
    """Return the constant number that a node multiplies or divides by."""
    other = getattr(node, "_saved_other", None)
    if isinstance(other, Tensor):
        return other.item() if other.numel() == 1 and not other.requires_grad else None
    return other if isinstance(other, int | float) else None


# A tensor without values: `torch.Tensor._make_wrapper_subclass`


def make_without_values(kind: type[Tensor], like: Tensor) -> Tensor:
    """Return a tensor of a subclass with this one's shape, dtype and device, but no values.

    Relies on `Tensor._make_wrapper_subclass`; there is no public name for it.
    """
    return Tensor._make_wrapper_subclass(kind, like.shape, dtype=like.dtype, device=like.device)


# Operations on lists of tensors: `torch._foreach_*`, `torch._amp_foreach_non_finite_check_and_unscale_`


def add_all_(tensors: list[Tensor], others: list[Tensor]) -> None:
    """Add `others[i]` to `tensors[i]`, in place, in as few kernels as possible."""
    if hasattr(torch, "_foreach_add_"):
        torch._foreach_add_(tensors, others)
    else:
        for tensor, other in zip(tensors, others, strict=True):
            tensor.add_(other)


def copy_all_(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copy `sources[i]` into `tensors[i]`, in as few kernels as possible."""
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(tensors, sources)
    else:
        for tensor, source in zip(tensors, sources, strict=True):
            tensor.copy_(source)


def multiply_all_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply all tensors, which have one dtype and device, by a zero-dimensional tensor, in place."""
    if hasattr(torch, "_foreach_mul_"):
        torch._foreach_mul_(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


def interpolate_all_(tensors: list[Tensor], others: list[Tensor], weight: float) -> None:
    """Move `tensors[i]` towards `others[i]` by a share `weight` of the way, in place, in as few kernels as possible."""
    if hasattr(torch, "_foreach_lerp_"):
        torch._foreach_lerp_(tensors, others, weight)
    else:
        for tensor, other in zip(tensors, others, strict=True):
            tensor.lerp_(other, weight)


def foreach_all_finite(tensors: list[Tensor]) -> bool:
    """Return whether every element of these non-empty tensors of one dtype and device is finite.

    Relies on the loss scaler's kernel, the fastest check there is: it multiplies by one, and checks every element on
    the way. It does not exist for bfloat16 on every device; there a norm shows the same.
    """
    if tensors[0].dtype == torch.bfloat16 and hasattr(torch, "_foreach_norm"):
        return bool(torch.stack(list(torch._foreach_norm(tensors, torch.inf))).isfinite().all())
    if tensors[0].dtype == torch.bfloat16 or not hasattr(torch, "_amp_foreach_non_finite_check_and_unscale_"):
        return all(bool(tensor.isfinite().all()) for tensor in tensors)
    one = _one(tensors[0].device)
    found = torch.zeros_like(one)
    torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, one)
    return found.item() == 0.0


@cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)


# Modules: `Module._buffers`, `Module._forward_pre_hooks`, `_NormBase` and `_BatchNorm` of batchnorm, `_SpectralNorm` of
# parametrizations, the classes that `fully_shard` and `torch.compile` make, `Module._compiled_call_impl`


def buffer_names(module: nn.Module) -> list[str]:
    """Return the names of a module's own buffers, empty ones included, which `named_buffers` omits."""
    return list(module._buffers)


def get_buffer(module: nn.Module, name: str) -> Tensor | None:
    """Return one of a module's own buffers."""
    return module._buffers[name]


def set_buffer(module: nn.Module, name: str, tensor: Tensor | None) -> None:
    """Put another tensor in a buffer's place. Bypasses `__setattr__`, which a module's class may override."""
    module._buffers[name] = tensor


def is_batch_norm(module: nn.Module) -> bool:
    """Return whether a module is a batch norm.

    Relies on `_BatchNorm`, the base of all batch norms; falls back to torch's own classes.
    """
    if _batch_norm_base is not None:
        return isinstance(module, _batch_norm_base)
    return isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm)


def has_running_statistics(module: nn.Module) -> bool:
    """Return whether a module is a batch norm or an instance norm, of any dimension.

    Relies on their base class `_NormBase`; falls back to the public classes.
    """
    return isinstance(module, _NORM_CLASSES if _norm_base is None else _norm_base)


def singular_vectors(module: nn.Module) -> list[str]:
    """Return the names of the buffers in which spectral norm keeps a weight's singular vectors.

    They follow from the weight alone. Relies on the class `_SpectralNorm` and its buffers `_u` and `_v`, or, for the
    older `torch.nn.utils.spectral_norm`, on `Module._forward_pre_hooks`; without them, they are buffers like others.
    """
    if _spectral_norm is not None and isinstance(module, _spectral_norm):
        return ["_u", "_v"]
    hooks = [each for each in module._forward_pre_hooks.values() if isinstance(each, SpectralNorm)]
    return [f"{hook.name}_{vector}" for hook in hooks for vector in "uv"]


def class_before_sharding(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module's author gave it.

    Relies on `fully_shard` making a subclass of `FSDPModule` and the author's class; the order does not matter.
    """
    kind = type(module)
    if any(base.__name__ == "FSDPModule" for base in kind.__bases__):
        return next(base for base in kind.__bases__ if base.__name__ != "FSDPModule")
    return kind


def compiled_child(module: nn.Module) -> nn.Module | None:
    """Return the original module inside a wrapper that `torch.compile` has made; None for any other module.

    Relies on the name of the wrapper's class and that of its child; there is no public way to the original.
    """
    if class_before_sharding(module).__name__ != "OptimizedModule":
        return None
    return next((child for name, child in module.named_children() if name == COMPILED_CHILD), None)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether `module.compile()` was called. Relies on `_compiled_call_impl`; without it the answer is no."""
    return getattr(module, "_compiled_call_impl", None) is not None


# DistributedDataParallel: `_check_reducer_finalized`


def has_reduced_every_bucket(ddp: DistributedDataParallel) -> bool:
    """Return whether the latest backward pass has reduced all of DistributedDataParallel's buckets.

    Relies on `_check_reducer_finalized`. Without it the answer is yes: an unused parameter is then reported by
    DistributedDataParallel itself, one step later and without its name.
    """
    check: Any = getattr(ddp, "_check_reducer_finalized", None)
    if check is None:
        return True
    try:
        check()
    except RuntimeError:
        return False
    return True


# Optimizers: `_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`, `_opt_called`


def share_step_hooks(optimizer: Optimizer, other: Optimizer) -> None:
    """Let `other` run the step hooks of `optimizer`, including those registered later. There is no public way."""
    other._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
    other._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Tell torch's schedulers that an optimizer has stepped, where a copy of it did.

    Relies on `_opt_called`. Without it schedulers warn that they ran before the optimizer; nothing else changes.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]
