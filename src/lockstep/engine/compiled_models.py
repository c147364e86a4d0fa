"""Models that torch.compile has wrapped: their parameters, buffers and modules by the names of the bare model.

`torch.compile(module)` returns a module that holds the original as its child `_orig_mod`, which thereby becomes a part
of every name below it. Checkpoints, digests and patterns do without it, so that a run can go on compiled or not.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.engine.torch_internals import COMPILED_CHILD, compiled_child, is_compiled_in_place


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile, or `model.compile()`, was applied to the model or to a module inside it."""
    return any(compiled_child(module) is not None or is_compiled_in_place(module) for module in model.modules())


def uncompiled(model: nn.Module) -> nn.Module:
    """Return the module inside the wrappers that torch.compile has put around the whole model."""
    while (inner := compiled_child(model)) is not None:
        model = inner
    return model


def plain_names(model: nn.Module) -> Callable[[str], str]:
    """Return a function from torch's names of modules, parameters and buffers in this model to those without wrappers.

    A module of the model's own that is called `_orig_mod` keeps its name.
    """

    @cache
    def inserted() -> frozenset[str]:
        return frozenset(
            f"{path}.{COMPILED_CHILD}".removeprefix(".")
            for path, module in model.named_modules(remove_duplicate=False)
            if compiled_child(module) is not None
        )

    def plain(name: str) -> str:
        if COMPILED_CHILD not in name:  # nearly always: the model need not be walked
            return name
        parts = name.split(".")
        return ".".join(part for end, part in enumerate(parts, 1) if ".".join(parts[:end]) not in inserted())

    return plain


def without_wrapper_names(name: str) -> str:
    """Return a saved name without what torch.compile has inserted. The last component is the tensor's own name."""
    *modules, tensor = name.split(".")
    return ".".join([*(module for module in modules if module != COMPILED_CHILD), tensor])


def named_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Parameter]]:
    """Yield what `model.named_parameters` does, by the names of the bare model."""
    plain = plain_names(model)
    for name, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield plain(name), parameter


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all buffers, those that are not persistent and all names of shared ones included."""
    plain = plain_names(model)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield plain(name), buffer


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what `model.named_modules` does, by the names of the bare model and without the wrappers."""
    plain = plain_names(model)
    for path, module in model.named_modules():
        if compiled_child(module) is None:
            yield plain(path), module


def state_by_name(model: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """Return what `model.state_dict` does, by the names of the bare model."""
    plain = plain_names(model)
    return {plain(name): value for name, value in model.state_dict(keep_vars=keep_vars).items()}


def load_state_by_name(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state that has the names of the bare model, as `model.load_state_dict` would.

    Raises torch's RuntimeError if it does not fit.
    """
    plain = plain_names(model)
    torch_names = {plain(name): name for name in model.state_dict()}
    model.load_state_dict({torch_names.get(name, name): value for name, value in state.items()})
