"""`TorchMetric`: any torchmetrics metric, updated chunk by chunk, with the same bits on any number of ranks.

torchmetrics' own synchronization reduces what each rank has already reduced, so its bits depend on the number of ranks.
Here a metric is reset and updated for every chunk, and its states are kept apart: the states of all chunks are then
reduced in chunk order, by each state's own `dist_reduce_fx`, and the metric is computed once from the result.

torchmetrics is imported on first use: lockstep does not need it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.metrics.accumulators import (
    Accumulator,
    GroupedAccumulator,
    MergedAccumulator,
    PieceAccumulator,
    RowAccumulator,
)

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

_UPDATES = "$updates"  # collected beside the states: the number of chunks

# [Note: torchmetrics internals] The names that torchmetrics does not make public, last seen in torchmetrics 1.9. Only
# the functions at the end of this file use them; without one of them, `TorchMetric` is refused with a clear message.
PRIVATE_METRIC_NAMES = ("_defaults", "_reductions", "_update_count", "_filter_kwargs")
PRIVATE_COLLECTION_NAMES = ("_groups",)


class TorchMetric:
    """A torchmetrics Metric or MetricCollection: write `TorchMetric(metric, …)` for `metric.update(…)`.

    Example:
        auroc = torchmetrics.classification.MulticlassAUROC(10)

        def metrics(model, batch):
            x, y = batch
            return {"auroc": TorchMetric(auroc, model(x), y)}

        run.evaluate(model, test_set, metrics)

    The metric object is moved to the device and used for one chunk at a time; what it held before is lost. A state
    that is reduced by "mean" weighs every chunk equally, as torchmetrics weighs every update.

    Args:
        metric: the torchmetrics metric; the same object for every batch.
        args: the positional arguments of its `update`.
        kwargs: the keyword arguments of its `update`.
    """

    def __init__(self, metric: "Metric | MetricCollection", /, *args: Any, **kwargs: Any) -> None:
        self._metric = metric
        self._args = args
        self._kwargs = kwargs
        _check(metric)

    def value(self, device: torch.device) -> dict[str, Any]:
        """The metric's states after this chunk alone."""
        members = _members(self._metric)
        if any(member.device != device for member in members.values()):
            self._metric.to(device)
        with _with_default_states(self._metric):
            self._update()
            states = {key: _current_state(member, state) for key, (member, state) in _states(self._metric).items()}
        return {_UPDATES: torch.ones((), dtype=torch.int64, device=device), **states}

    def accumulator(self) -> GroupedAccumulator:
        """An accumulator for each state."""
        states = _states(self._metric).items()
        accumulators = {key: _reduction_of(member, state).accumulator() for key, (member, state) in states}
        return GroupedAccumulator({_UPDATES: MergedAccumulator(), **accumulators})

    def result(self, collected: dict[str, Any]) -> Any:
        """The metric, computed once from the states of all chunks."""
        num_updates = int(collected[_UPDATES])
        with _with_default_states(self._metric), _without_synchronization(self._metric):
            for member in _members(self._metric).values():
                _set_update_count(member, num_updates)
            for key, (member, state) in _states(self._metric).items():
                reduced = _reduction_of(member, state).reduce(collected[key])
                setattr(member, state, _to(member.device, reduced))
            return self._metric.compute()

    def _update(self) -> None:
        from torchmetrics import Metric

        if isinstance(self._metric, Metric):
            self._metric.update(*self._args, **self._kwargs)
            return
        for member in _members(self._metric, deep=False).values():
            member.update(*self._args, **_accepted_kwargs(member, self._kwargs))


class _Reduction(NamedTuple):
    """How a state is collected over chunks, and how the values of all chunks become one."""

    accumulator: Callable[[], Accumulator]
    reduce: Callable[[Any], Any]


def _reduction_of(member: "Metric", state: str) -> _Reduction:
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

    reduction: Any = _reduce_function(member, state)
    if isinstance(_state_defaults(member)[state], list):
        is_list = reduction in (None, dim_zero_cat)  # the metric itself would hold a list of tensors
        return _Reduction(PieceAccumulator, _joined if is_list else lambda chunks: reduction(_joined(chunks)))
    known = {
        dim_zero_sum: _Reduction(MergedAccumulator, _unchanged),
        dim_zero_max: _Reduction(functools.partial(MergedAccumulator, torch.maximum), _unchanged),
        dim_zero_min: _Reduction(functools.partial(MergedAccumulator, torch.minimum), _unchanged),
        dim_zero_cat: _Reduction(PieceAccumulator, lambda chunks: torch.cat(_joined(chunks))),
        dim_zero_mean: _Reduction(RowAccumulator, lambda rows: rows.double().mean(0).to(rows.dtype)),
        None: _Reduction(RowAccumulator, lambda rows: _reduced(rows, _unchanged)),
    }
    return known.get(reduction) or _Reduction(RowAccumulator, lambda rows: _reduced(rows, reduction))


def _reduced(rows: Tensor, reduction: Callable[[Tensor], Tensor]) -> Tensor:
    """The rows reduced; a single chunk's state is returned unstacked, as a metric expects it from a single process."""
    return rows[0] if len(rows) == 1 else reduction(rows)


def _joined(chunks: list[list[Tensor]]) -> list[Tensor]:
    return [piece for chunk in chunks for piece in chunk]


def _unchanged(value: Any) -> Any:
    return value


def _to(device: torch.device, value: Any) -> Any:
    return [element.to(device) for element in value] if isinstance(value, list) else value.to(device)


def _members(metric: "Metric | MetricCollection", *, deep: bool = True) -> dict[str, "Metric"]:
    """All metrics inside by their path, including those inside wrappers; if not `deep`, a collection's own only."""
    from torchmetrics import Metric

    modules = metric.named_modules() if deep else metric.named_children()
    return {path: module for path, module in modules if isinstance(module, Metric)}


def _states(metric: "Metric | MetricCollection") -> dict[str, tuple["Metric", str]]:
    """Every state by its path: the metric it belongs to, and its name there."""
    return {
        f"{path}.{state}" if path else state: (member, state)
        for path, member in _members(metric).items()
        for state in _state_defaults(member)
    }


def _current_state(member: "Metric", state: str) -> Tensor | list[Tensor]:
    value = getattr(member, state)
    for element in value if isinstance(value, list) else [value]:
        if not isinstance(element, Tensor):
            raise UserError(
                f"the state {state!r} of {type(member).__name__} holds a {type(element).__name__}: only tensors can be "
                "gathered from all ranks"
            )
    # A copy of the list, because a reset empties it; the tensors in it are not changed.
    return list(value) if isinstance(value, list) else value


@contextmanager
def _with_default_states(metric: "Metric | MetricCollection") -> Iterator[None]:
    """Every state at its default before and after the block, and no state shared within a collection.

    A collection compares its members' states after the first update, and from then on shares those that are equal. That
    must depend neither on a rank's own chunks nor on what the collection saw earlier.
    """
    with _without_compute_groups(metric):
        _reset(metric)
        try:
            yield
        finally:
            _reset(metric)


def _reset(metric: "Metric | MetricCollection") -> None:
    for member in _members(metric).values():
        for state, default in _state_defaults(member).items():
            # New objects, because members of a collection may share a list, and a reduced state may no longer be one.
            setattr(member, state, [] if isinstance(default, list) else default.detach().clone())
    metric.reset()


@contextmanager
def _without_synchronization(metric: "Metric | MetricCollection") -> Iterator[None]:
    """In the block the metric does not synchronize: its states are already those of all ranks."""
    members = list(_members(metric).values())
    functions = [member.distributed_available_fn for member in members]
    for member in members:
        member.distributed_available_fn = _is_never_distributed
    try:
        yield
    finally:
        for member, function in zip(members, functions, strict=True):
            member.distributed_available_fn = function


def _is_never_distributed() -> bool:
    return False


def _check(metric: Any) -> None:
    try:
        from torchmetrics import Metric, MetricCollection
        from torchmetrics.wrappers import Running
    except ImportError:
        raise UserError("TorchMetric(…) needs torchmetrics: pip install 'lockstep-train[metrics]'") from None

    name = type(metric).__name__
    if not isinstance(metric, Metric | MetricCollection):
        raise UserError(
            f"TorchMetric({name}, …): expected a torchmetrics Metric or MetricCollection, then its update's arguments"
        )
    _check_private_names(metric)
    for module in metric.modules():
        if isinstance(module, Running):
            raise UserError(
                f"TorchMetric({name}, …): Running covers the last few updates only: give the metric inside it"
            )
        if isinstance(module, MetricCollection) and module is not metric:
            raise UserError(f"TorchMetric({name}, …) contains a MetricCollection: give the collection itself")
    if not _states(metric):
        raise UserError(f"TorchMetric({name}, …): {name} has no states to gather; define them with add_state")


# What torchmetrics does not make public. [Note: torchmetrics internals]


def _check_private_names(metric: "Metric | MetricCollection") -> None:
    from torchmetrics import MetricCollection, __version__

    missing = {
        name for member in _members(metric).values() for name in PRIVATE_METRIC_NAMES if not hasattr(member, name)
    }
    if isinstance(metric, MetricCollection):
        missing |= {name for name in PRIVATE_COLLECTION_NAMES if not hasattr(metric, name)}
    if missing:
        raise UserError(
            f"TorchMetric({type(metric).__name__}, …) does not work with torchmetrics {__version__}, which has no "
            f"{', '.join(sorted(missing))}: install torchmetrics 1.9"
        )


def _state_defaults(member: "Metric") -> dict[str, Tensor | list[Tensor]]:
    """The states that the metric has added, and their initial values."""
    return cast("dict[str, Tensor | list[Tensor]]", member._defaults)


def _reduce_function(member: "Metric", state: str) -> Any:
    """The state's `dist_reduce_fx`: a function, or None."""
    return member._reductions[state]


def _set_update_count(member: "Metric", count: int) -> None:
    """Set how many times the metric counts itself as updated; with 0 its `compute` warns."""
    member._update_count = count


def _accepted_kwargs(member: "Metric", kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments that the metric's `update` takes."""
    return member._filter_kwargs(**kwargs)


@contextmanager
def _without_compute_groups(metric: "Metric | MetricCollection") -> Iterator[None]:
    """In the block, no two members of a collection share their states."""
    groups = getattr(metric, "_groups", None)
    if groups is None:
        yield
        return
    metric._groups = {}
    try:
        yield
    finally:
        metric._groups = groups
