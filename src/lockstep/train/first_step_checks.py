"""Checks of a loop's first step: mistakes in the loss, the model or the loop that would otherwise train wrongly.

Most of them show in every step, so later steps pay nothing for looking.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lockstep.engine.compiled_models import named_buffers, named_modules
from lockstep.engine.lane_buffers import BufferSlot, new_buffer_error
from lockstep.engine.loss_table import Terms, as_count, titled
from lockstep.engine.stand_in_gradient import GradientInsideLanes
from lockstep.engine.torch_internals import is_mean, version_of
from lockstep.errors import UserError
from lockstep.train.pending_pass import SavedBuffer
from lockstep.world.keyed_random import preserve_rng_states

_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))  # which every module has, such as _parameters and training
_MAX_ELEMENTS = 100  # of a list or a dictionary that are compared
_MAX_DEPTH = 3
_MAX_NAMES = 4

BufferShapes = set[tuple[int, str, torch.Size]]  # by the model's number and the buffer's name


class FirstStepChecks:
    """What is looked at while the first step of `run.steps(…)` runs its lanes."""

    def __init__(
        self, models: Sequence[nn.Module], buffers: Sequence[BufferSlot], *, compares_lanes: bool, saves: bool
    ) -> None:
        """Prepare for the first step.

        Args:
            models: the run's.
            buffers: theirs.
            compares_lanes: run a lane twice if a forward pass changes attributes of the model, and compare.
            saves: the run makes checkpoints, which must fit these models when they are made anew.
        """
        self._models = models
        self._buffers = buffers
        self._compares_lanes = compares_lanes
        self._shapes = _shapes_of_buffers(models) if saves else None

    def begin_pass(self, parameters: Sequence[Parameter]) -> "FirstPassChecks":
        """Begin a pass over the lanes for the gradients of these parameters."""
        buffers = self._buffers if self._compares_lanes else None
        return FirstPassChecks(parameters, self._models, buffers, self._shapes)


class FirstPassChecks:
    """The checks of one pass over the lanes."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        models: Sequence[nn.Module],
        buffers: Sequence[BufferSlot] | None,
        shapes: BufferShapes | None,
    ) -> None:
        """`buffers`: None if no lane is to be run twice. `shapes`: the buffers', None if they may change."""
        self._parameters = parameters
        self._shapes = shapes
        self._models = models
        self._buffers = buffers
        self._saved = [] if buffers is None else [SavedBuffer.capture(slot) for slot in buffers]
        self._attributes = {} if buffers is None else _attributes_of(models)
        self._data: Any = None  # of the first lane, to notice if the loss changes it
        self._sums: list[Tensor] | None = None  # the first lane's
        self._changed: list[str] | None = None  # attributes, once the first lane has been run

    def open_lane(self, data: Any) -> None:
        """Note a lane's data, before the script sees it."""
        if self._sums is None:
            self._data = _Mark.of(data)

    def check_loss(self, terms: Terms) -> None:
        """Look at a lane's loss, before its backward pass."""
        for name, (loss_sum, given) in terms.items():
            count = float(as_count(given))
            if count > 1 and is_mean(loss_sum, count):
                raise UserError(
                    f"{titled(name)} is a mean over the batch, given with a count of {count:g}, so it would be divided "
                    "twice: return the sum, as reduction='sum' or loss.sum() gives it, and the count"
                )
        if self._sums is None:
            self._sums = [loss_sum.detach().clone() for loss_sum, _ in terms.values()]

    def after_backward(self) -> None:
        """Let whoever reads a gradient inside the loop over the lanes know that it is not there yet."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = GradientInsideLanes(parameter)

    def close_lane(self) -> None:
        """End a lane."""
        for parameter in self._parameters:
            if isinstance(parameter.grad, GradientInsideLanes):
                parameter.grad = None
        if self._changed is None and self._buffers is not None:
            now = _attributes_of(self._models)
            self._changed = [name for name in now if now[name] != self._attributes.get(name)]

    def end_pass(self, run_again: Callable[[], tuple[Any, Terms]] | None) -> None:
        """Raise if lanes have made buffers, or if the first lane's loss depends on what attributes hold by now.

        `run_again`: computes the first lane's loss once more, and returns its data and terms; None if the script runs
        the lanes itself.
        """
        if self._shapes is not None:
            new = [name for _, name, _ in _shapes_of_buffers(self._models) - self._shapes]
            if new:
                raise new_buffer_error(min(new))
        if not self._changed or run_again is None or self._sums is None or self._buffers is None:
            return
        now = [SavedBuffer.capture(slot) for slot in self._buffers]
        attributes = [_SavedAttributes(module) for model in self._models for module in model.modules()]
        for saved in self._saved:
            saved.restore()
        with preserve_rng_states(cuda=True):
            data, terms = run_again()
        for saved in now:
            saved.restore()
        for module_attributes in attributes:
            module_attributes.restore()
        again = [loss_sum.detach() for loss_sum, _ in terms.values()]
        is_comparable = _Mark.of(data) == self._data and all(each.isfinite().all() for each in [*self._sums, *again])
        if is_comparable and not all(map(torch.equal, self._sums, again)):
            raise UserError(
                f"the forward pass depends on the model's {_listed(self._changed)}, which it changes: the result would "
                "depend on the number of processes: make it a buffer (register_buffer), or compute it from the batch"
            )


def _shapes_of_buffers(models: Sequence[nn.Module]) -> BufferShapes:
    return {
        (number, name, buffer.shape) for number, model in enumerate(models) for name, buffer in named_buffers(model)
    }


class _Mark:
    """What a value is and holds, as far as that can be seen cheaply. It keeps the value alive, so ids stay true."""

    def __init__(self, content: Any, value: Any = None) -> None:
        self._content = content
        self._value = value

    @classmethod
    def of(cls, value: Any, depth: int = 0) -> "_Mark":
        """Return the mark of a value, and of a few levels of what it contains."""
        if value is None or isinstance(value, str | bytes | bool | int | float | complex):
            return cls((type(value), repr(value)))
        if isinstance(value, Tensor):
            return cls((id(value), 0 if value.is_inference() else version_of(value)), value)
        if isinstance(value, torch.Generator):
            return cls(value.get_state().numpy().tobytes())
        if depth < _MAX_DEPTH and isinstance(value, Mapping):
            parts = list(value.items())[:_MAX_ELEMENTS]
            return cls((len(value), [(_Mark.of(key), _Mark.of(each, depth + 1)) for key, each in parts]))
        if depth < _MAX_DEPTH and isinstance(value, list | tuple | deque):
            return cls((len(value), [_Mark.of(each, depth + 1) for each in list(value)[:_MAX_ELEMENTS]]))
        return cls(id(value), value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mark) and bool(self._content == other._content)

    def __hash__(self) -> int:
        return 0  # contents may be lists; nobody needs a set of marks


class _SavedAttributes:
    """A module's plain attributes, with the contents of what may be changed in place."""

    def __init__(self, module: nn.Module) -> None:
        self._attributes = vars(module)
        self._values = {key: (value, _copy(value)) for key, value in _plain_attributes(module)}

    def restore(self) -> None:
        """Undo all changes of attributes, also those in place."""
        for key, (value, content) in self._values.items():
            self._attributes[key] = value
            if isinstance(value, Tensor):
                value.detach().copy_(content)
            elif isinstance(value, torch.Generator):
                value.set_state(content)
            elif isinstance(value, list | deque):
                value.clear()
                value.extend(content)
            elif isinstance(value, dict | set):
                value.clear()
                value.update(content)


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.copy() if isinstance(value, list | dict | set | deque) else None


def _plain_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in vars(module).items() if key not in _OWN_ATTRIBUTES)


def _attributes_of(models: Sequence[nn.Module]) -> dict[str, _Mark]:
    """Return the plain attributes of all modules: those that are not parameters, buffers or modules.

    Not lists and dictionaries: they are mostly records for somebody to read.
    """
    return {
        f"{name}.{key}" if name else key: _Mark.of(value)
        for model in models
        for name, module in named_modules(model)
        for key, value in _plain_attributes(module)
        if not isinstance(value, list | dict | set | deque)
    }


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"attribute {', '.join(names[:_MAX_NAMES])}{more}"
