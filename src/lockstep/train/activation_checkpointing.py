"""Activation checkpointing: recompute a block's activations in the backward pass instead of keeping them in memory.

A chosen module's `forward` is replaced on the instance, and nothing else: its name, class, parameters, hooks and state
keys stay. `torch.utils.checkpoint` does the work.

[Note: recomputation] A recomputation must see what the forward pass saw, and must leave no trace. So torch's, NumPy's
and Python's random streams start where they started then, and continue afterwards as if nothing had been drawn. The
block's buffers are copies of what they were then: the real ones, such as batch-norm statistics, change once, in the
forward pass. So the bits are those without checkpointing.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from difflib import get_close_matches
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lockstep.config.argument_checks import require_count
from lockstep.engine.lane_buffers import buffer_slots
from lockstep.engine.torch_internals import class_before_sharding, has_running_statistics
from lockstep.errors import UserError
from lockstep.world.keyed_random import RngStates

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_LARGE = 0.5  # of the parameters of the class with the most
_MAX_NAMES = 12  # in a message
_ORIGINAL = "_forward_that_keeps_activations"  # the attribute that holds a module's own forward meanwhile


class CheckpointedModules(NamedTuple):
    """The modules of one model whose activations are recomputed."""

    names: list[str]
    kinds: list[str]
    among: int  # the number of modules of these classes

    def __str__(self) -> str:
        shown = self.names if len(self.names) < 4 else [self.names[0], self.names[1], "…", self.names[-1]]
        return f"{len(self.names)} of {self.among} {' and '.join(self.kinds)} ({', '.join(shown)})"


def checkpoint_activations(model: nn.Module, *, every: int = 1, classes: Sequence[str] = ()) -> CheckpointedModules:
    """Recompute the activations of a model's blocks in the backward pass. Replaces an earlier choice.

    Args:
        model: changed in place.
        every: recompute every `every`-th of the modules.
        classes: the names of the modules' classes. Without, the model's repeated blocks: modules of one class that
            follow each other in a Sequential or a ModuleList. Of several such classes with at least half as many
            parameters as the largest, the one repeated most often.

    Returns:
        The modules that are recomputed.
    """
    check_checkpointing_options(every, classes)
    require_all_classes([model], classes)
    chosen = checkpoint_matching(model, every=every, classes=classes)
    if chosen is None:
        raise no_repeated_block([model])
    return chosen


def checkpoint_matching(model: nn.Module, *, every: int = 1, classes: Sequence[str] = ()) -> CheckpointedModules | None:
    """Checkpoint one of several models, which need not have all classes. Returns None if it has none of them."""
    found = _of_classes(model, classes) if classes else _repeated_blocks(model)
    if not found:
        return None
    keep_activations(model)
    for _, module in found[::every]:
        _recompute(module)
    kinds = list(dict.fromkeys(class_before_sharding(module).__name__ for _, module in found))
    return CheckpointedModules([name for name, _ in found[::every]], kinds, len(found))


def require_all_classes(models: Iterable[nn.Module], classes: Iterable[str]) -> None:
    """Raise unless each class is in at least one of the models."""
    known = _classes_in(models)
    for name in classes:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise UserError(f"activation checkpointing: the model has no {name}{hint}: it has {_listed(known)}")


def no_repeated_block(models: Iterable[nn.Module]) -> UserError:
    """Return the error for models in which no block is repeated."""
    return UserError(
        "activation checkpointing: no block is repeated in this model: choose the modules to recompute with "
        f"classes=[…], any of {_listed(_classes_in(models))}"
    )


def check_checkpointing_options(every: Any = 1, classes: Any = ()) -> None:
    """Raise if the options cannot be right for any model."""
    require_count("activation checkpointing: every", every)
    is_list = isinstance(classes, Collection) and not isinstance(classes, str)
    if not is_list or not all(isinstance(name, str) for name in classes):
        raise UserError(f"activation checkpointing: classes={classes!r}: expected a list of names")


def keep_activations(model: nn.Module) -> None:
    """Undo `checkpoint_activations`."""
    for module in model.modules():
        if _ORIGINAL in module.__dict__:
            original = module.__dict__.pop(_ORIGINAL)
            module.__dict__.pop("forward")
            if original is not None:
                module.__dict__["forward"] = original


def _of_classes(model: nn.Module, classes: Collection[str]) -> list[tuple[str, nn.Module]]:
    found = [
        (name, module) for name, module in model.named_modules() if class_before_sharding(module).__name__ in classes
    ]
    for _, module in found:
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            kind = class_before_sharding(module).__name__
            raise UserError(f"activation checkpointing: {kind} only holds modules: name their class instead")
    return found


def _repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return the modules of the class to recompute by default; see `checkpoint_activations`."""
    groups: dict[type[nn.Module], list[tuple[str, nn.Module]]] = defaultdict(list)
    num_in_a_row: Counter[type[nn.Module]] = Counter()
    for name, module in model.named_modules():
        if isinstance(module, _CONTAINERS):
            kinds = [class_before_sharding(child) for child in module.children()]
            num_in_a_row.update(kind for kind in kinds if kinds.count(kind) > 1)
            continue
        kind = class_before_sharding(module)
        has_children, has_parameters = any(True for _ in module.children()), any(True for _ in module.parameters())
        if has_parameters and (has_children or not kind.__module__.startswith("torch.nn.")):
            groups[kind].append((name, module))
    repeated = {kind: group for kind, group in groups.items() if len(group) > 1}
    if not repeated:
        return []
    repeated = {kind: group for kind, group in repeated.items() if kind in num_in_a_row} or repeated
    sizes = {
        kind: sum(parameter.numel() for parameter in {p for _, module in group for p in module.parameters()})
        for kind, group in repeated.items()
    }
    large = [kind for kind, size in sizes.items() if size >= _LARGE * max(sizes.values())]
    return repeated[max(large, key=lambda kind: (num_in_a_row[kind], sizes[kind]))]


def _recompute(module: nn.Module) -> None:
    # Into __dict__, because setting an attribute of a compiled module sets it on the module inside. As a bound method,
    # because a deep copy of the module then gets a method of the copy.
    module.__dict__[_ORIGINAL] = module.__dict__.get("forward")
    module.__dict__["forward"] = MethodType(forward, module)


def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replace a module's own forward: recompute its activations in the backward pass.

    It has the name of the method that it replaces, because pickle looks methods up by name: a model loaded from a file
    then has its own forward again.
    """
    original = self.__dict__[_ORIGINAL] or partial(type(self).forward, self)
    if not (self.training and torch.is_grad_enabled()):
        return original(*args, **kwargs)
    if torch.compiler.is_compiling():  # the compiler takes care of randomness and buffers
        return checkpoint(original, *args, use_reentrant=False, **kwargs)
    contexts = partial(_contexts, self)
    return checkpoint(original, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, **kwargs)


def _contexts(module: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the forward pass, which is about to begin, and of every recomputation."""
    return nullcontext(), _StateAtForward(module)


class _StateAtForward:
    """Restores, while it is entered, random streams and buffers as they were when it was made. [Note: recomputation]"""

    def __init__(self, module: nn.Module) -> None:
        self._streams = RngStates.now(_gpus(module))
        self._buffers = _BuffersAtForward(module)
        self._open = ExitStack()

    def __enter__(self) -> None:
        self._open.callback(RngStates.now(self._streams.cuda).put_back)
        self._open.enter_context(self._buffers.swapped_in())
        self._streams.put_back()

    def __exit__(self, *_error: object) -> None:
        self._open.close()


class _BuffersAtForward:
    """Copies of a block's buffers before its forward pass."""

    def __init__(self, module: nn.Module) -> None:
        copies = _SharedCopies()
        # In training, the output of batch norm does not depend on its statistics: these need no copy.
        self._values = {
            slot: None if has_running_statistics(slot.module) else copies(slot.get()) for slot in buffer_slots([module])
        }

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Put fresh copies of the values into the modules, and afterwards what the modules had before."""
        before = {slot: slot.get() for slot in self._values}
        copies = _SharedCopies()
        try:
            for slot, value in self._values.items():
                slot.set(copies(before[slot] if value is None else value))
            yield
        finally:
            for slot, tensor in before.items():
                slot.set(tensor)


class _SharedCopies:
    """Copies tensors. Modules that share a buffer share its copy."""

    def __init__(self) -> None:
        self._made: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor.detach().clone()
        return self._made[id(tensor)]


def _classes_in(models: Iterable[nn.Module]) -> set[str]:
    return {class_before_sharding(module).__name__ for model in models for module in model.modules()}


def _gpus(module: nn.Module) -> set[int]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return set()
    return {p.device.index for p in module.parameters() if p.is_cuda} | {torch.cuda.current_device()}


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_MAX_NAMES]) + (" …" if len(shown) > _MAX_NAMES else "")


class RecomputedModules:
    """Which modules of a run's models are recomputed, and whether that is what its options ask for.

    Args:
        options: the run's `activation_checkpointing`.
        facts: of the run's start event; the modules' names are added to it.
    """

    def __init__(self, options: Mapping[str, Any] | None, facts: dict[str, Any]) -> None:
        self._options = options
        self._facts = facts
        self._modules: dict[nn.Module, str] = {}  # by model

    def begin(self, model: nn.Module) -> None:
        """Apply the options to a new model."""
        if self._options is not None:
            self.note(model, checkpoint_matching(model, **self._options))

    def note(self, model: nn.Module, chosen: CheckpointedModules | None) -> None:
        """Add a model's recomputed modules to the start event."""
        if chosen is not None:
            self._modules[model] = str(chosen)
            self._facts["recomputed"] = "; ".join(self._modules.values())

    def check(self, models: Sequence[nn.Module]) -> None:
        """Raise if none of the models has what the options ask for."""
        if self._options is None or not models:
            return
        require_all_classes(models, self._options.get("classes", ()))
        if not self._modules:
            raise no_repeated_block(models)
