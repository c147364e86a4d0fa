"""Activation checkpointing: what a block's forward pass would keep for the backward pass is computed again there.

A chosen module's `forward` is replaced on the instance, and nothing else: its name, its class, its parameters and hooks
and the keys of its state stay. torch's own checkpoint does the work; what it would get wrong is set right around it.

[Note: the same again] A recomputation must see what the forward pass saw, and leave no trace. So torch's, numpy's and
Python's streams begin where they began then, and go on afterwards as if nothing had been drawn; and the block's buffers
are copies of what they were then: the real ones, batch-norm statistics among them, are changed once, by the forward
pass. So the bits are those without checkpointing.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from difflib import get_close_matches
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from lockstep.config.arguments import require_count
from lockstep.engine.buffers import slots_of
from lockstep.errors import UserError
from lockstep.world.randomness import StreamStates

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MUCH = 0.5  # of the parameters of the class that has the most
_MOST_NAMES = 12  # in a message
_PLAIN = "_forward_that_keeps_activations"


class Chosen(NamedTuple):
    """The modules of one model whose activations are recomputed."""

    names: list[str]
    kinds: list[str]
    among: int  # modules of these classes

    def __str__(self) -> str:
        shown = self.names if len(self.names) < 4 else [self.names[0], self.names[1], "…", self.names[-1]]
        return f"{len(self.names)} of {self.among} {' and '.join(self.kinds)} ({', '.join(shown)})"


def checkpoint_activations(model: nn.Module, *, every: int = 1, classes: Sequence[str] = ()) -> Chosen:
    """Recompute the activations of every `every`-th module of these classes, in the place of any choice before.

    Without classes, of the model's repeated blocks: modules of one class that stand in a row in a Sequential or a
    ModuleList. Of several such classes, the one with the longest rows, of those that have at least half as many
    parameters as any.
    """
    check_choice(every, classes)
    require_all_classes([model], classes)
    chosen = checkpoint_what_there_is(model, every=every, classes=classes)
    if chosen is None:
        raise nothing_repeated([model])
    return chosen


def checkpoint_what_there_is(model: nn.Module, *, every: int = 1, classes: Sequence[str] = ()) -> Chosen | None:
    """The same for one of several models: what it does not have is left to the others. None: it has nothing of it."""
    found = _of_classes(model, classes) if classes else _repeated_blocks(model)
    if not found:
        return None
    keep_activations(model)
    for _, module in found[::every]:
        _recompute(module)
    kinds = list(dict.fromkeys(_class_of(module).__name__ for _, module in found))
    return Chosen([name for name, _ in found[::every]], kinds, len(found))


def require_all_classes(models: Iterable[nn.Module], classes: Iterable[str]) -> None:
    """Each in one model or another."""
    there = _classes_in(models)
    for name in classes:
        if name not in there:
            near = get_close_matches(name, there, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"activation checkpointing: the model has no {name}{hint}: it has {_listed(there)}")


def nothing_repeated(models: Iterable[nn.Module]) -> UserError:
    return UserError(
        "activation checkpointing: no block is repeated in this model: say which modules are recomputed, as "
        f"classes=[…] of {_listed(_classes_in(models))}"
    )


def check_choice(every: Any = 1, classes: Any = ()) -> None:
    """As far as it can be known to be wrong without a model."""
    require_count("activation checkpointing: every", every)
    is_list = isinstance(classes, Collection) and not isinstance(classes, str)
    if not is_list or not all(isinstance(name, str) for name in classes):
        raise UserError(f"activation checkpointing: classes={classes!r}: expected a list of names")


def keep_activations(model: nn.Module) -> None:
    """Take it back."""
    for module in model.modules():
        if _PLAIN in module.__dict__:
            plain = module.__dict__.pop(_PLAIN)
            module.__dict__.pop("forward")
            if plain is not None:
                module.__dict__["forward"] = plain


def _of_classes(model: nn.Module, classes: Collection[str]) -> list[tuple[str, nn.Module]]:
    found = [(name, module) for name, module in model.named_modules() if _class_of(module).__name__ in classes]
    for _, module in found:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            kind = _class_of(module).__name__
            raise UserError(f"activation checkpointing: {kind} only holds modules: name the class of those")
    return found


def _repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    groups: dict[type[nn.Module], list[tuple[str, nn.Module]]] = defaultdict(list)
    in_a_row: Counter[type[nn.Module]] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, _CONTAINERS):
            kinds = [_class_of(child) for child in module.children()]
            in_a_row.update(kind for kind in kinds if kinds.count(kind) > 1)
            continue
        has_parts = any(True for _ in module.children()) or not _class_of(module).__module__.startswith("torch.nn.")
        if has_parts and any(True for _ in module.parameters()):
            groups[_class_of(module)].append((name, module))
    repeated = {kind: group for kind, group in groups.items() if len(group) > 1}
    if not repeated:
        return []
    repeated = {kind: group for kind, group in repeated.items() if kind in in_a_row} or repeated
    sizes = {
        kind: sum(parameter.numel() for parameter in {p for _, module in group for p in module.parameters()})
        for kind, group in repeated.items()
    }
    large = [kind for kind, size in sizes.items() if size >= _MUCH * max(sizes.values())]
    return repeated[max(large, key=lambda kind: (in_a_row[kind], sizes[kind]))]


def _recompute(module: nn.Module) -> None:
    # Into __dict__: a compiled module hands what is set on it to the module inside. As a method, because a deep copy
    # of the module then has the copy's own.
    module.__dict__[_PLAIN] = module.__dict__.get("forward")
    module.__dict__["forward"] = MethodType(forward, module)


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """In the place of a module's own. It is called so because a pickled method is found again by its name: a model
    that is loaded from a file keeps its activations."""
    plain = self.__dict__[_PLAIN] or partial(type(self).forward, self)
    if not (self.training and torch.is_grad_enabled()):
        return plain(*args, **kwargs)
    if torch.compiler.is_compiling():  # then the compiler sees to randomness and to buffers
        return checkpoint(plain, *args, use_reentrant=False, **kwargs)
    contexts = partial(_contexts, self)
    return checkpoint(plain, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For the forward pass, which is about to begin, and for every recomputation of it."""
    return nullcontext(), _AsThen(module)


class _AsThen:
    """[Note: the same again] Inside, it is as it was when this was made. To be entered once for each backward pass."""

    def __init__(self, module: nn.Module) -> None:
        self._streams = StreamStates.now(_gpus(module))
        self._buffers = _BuffersThen(module)
        self._open = ExitStack()

    def __enter__(self) -> None:
        self._open.callback(StreamStates.now(self._streams.cuda).put_back)
        self._open.enter_context(self._buffers.lent())
        self._streams.put_back()

    def __exit__(self, *_error: object) -> None:
        self._open.close()


class _BuffersThen:
    """A block's buffers before its forward pass."""

    def __init__(self, module: nn.Module) -> None:
        copies = _Copies()
        # In training, what batch norm returns does not depend on its statistics: they need not be as they were.
        self._values = {
            slot: None if isinstance(slot.module, _NormBase) else copies(slot.module._buffers[slot.key])
            for slot in slots_of([module])
        }

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The modules have copies of them; afterwards, what they had before."""
        now = {slot: slot.module._buffers[slot.key] for slot in self._values}
        copies = _Copies()
        try:
            for slot, value in self._values.items():
                slot.module._buffers[slot.key] = copies(now[slot] if value is None else value)
            yield
        finally:
            for slot, tensor in now.items():
                slot.module._buffers[slot.key] = tensor


class _Copies:
    """Two modules that share a buffer share its copy."""

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor.detach().clone()
        return self._made[id(tensor)]


def _class_of(module: nn.Module) -> type[nn.Module]:
    """As its author called it: a module that FSDP has sharded is of a class made for it."""
    kind = type(module)
    return kind.__bases__[1] if kind.__bases__[0].__name__ == "FSDPModule" else kind


def _classes_in(models: Iterable[nn.Module]) -> set[str]:
    return {_class_of(module).__name__ for model in models for module in model.modules()}


def _gpus(module: nn.Module) -> set[int]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return set()
    return {p.device.index for p in module.parameters() if p.is_cuda} | {torch.cuda.current_device()}


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_MOST_NAMES]) + (" …" if len(shown) > _MOST_NAMES else "")
