"""Any torchmetrics metric, fed chunk by chunk, with the same bits on any number of ranks.

torchmetrics' own synchronisation reduces what each rank has reduced before, so its bits follow the number of ranks.
Here a metric is reset and updated for every chunk, and its states are kept apart: all chunks' states are then reduced
in chunk order, by each state's own `dist_reduce_fx`, and the metric is computed once from what that gives.

torchmetrics is imported on first use: lockstep does not need it.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.metrics.keepers import Keeper, Merged, Pieces, Rows, Together

if TYPE_CHECKING:
    from torchmetrics import Metric, MetricCollection

_UPDATES = "$updates"  # beside the states: how many chunks there were


class Feed:
    """Feeds a torchmetrics Metric or MetricCollection: `Feed(metric, …)` for what would be `metric.update(…)`.

    The metric object is a tool here: it is moved to the device and used for one chunk at a time, and what it held
    before is lost. A state reduced by "mean" counts every chunk alike, as torchmetrics counts every update.
    """

    def __init__(self, metric: "Metric | MetricCollection", /, *args: Any, **kwargs: Any) -> None:
        self._metric = metric
        self._args = args
        self._kwargs = kwargs
        _check(metric)

    def value(self, device: torch.device) -> dict[str, Any]:
        members = _members(self._metric)
        if any(member.device != device for member in members.values()):
            self._metric.to(device)
        with _clean(self._metric):
            self._update()
            states = {key: _snapshot(member, state) for key, (member, state) in _states(self._metric).items()}
        return {_UPDATES: torch.ones((), dtype=torch.int64, device=device), **states}

    def keeper(self) -> Together:
        keepers = {key: _way(member, state).keeper() for key, (member, state) in _states(self._metric).items()}
        return Together({_UPDATES: Merged(), **keepers})

    def result(self, kept: dict[str, Any]) -> Any:
        num_updates = int(kept[_UPDATES])
        with _clean(self._metric), _without_synchronisation(self._metric):
            for member in _members(self._metric).values():
                member._update_count = num_updates
            for key, (member, state) in _states(self._metric).items():
                setattr(member, state, _moved(_way(member, state).finish(kept[key]), member.device))
            return self._metric.compute()

    def _update(self) -> None:
        from torchmetrics import Metric

        if isinstance(self._metric, Metric):
            self._metric.update(*self._args, **self._kwargs)
            return
        for member in _members(self._metric, deep=False).values():
            member.update(*self._args, **member._filter_kwargs(**self._kwargs))


class _Way(NamedTuple):
    """How a state is kept, and what becomes of all chunks' values."""

    keeper: Callable[[], Keeper]
    finish: Callable[[Any], Any]


def _way(member: "Metric", state: str) -> _Way:
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_mean, dim_zero_min, dim_zero_sum

    reduction: Any = member._reductions[state]
    if isinstance(member._defaults[state], list):
        is_plain = reduction in (None, dim_zero_cat)  # a list of tensors is what the metric itself would hold
        return _Way(Pieces, _joined if is_plain else lambda chunks: reduction(_joined(chunks)))
    ways = {
        dim_zero_sum: _Way(Merged, _as_it_is),
        dim_zero_max: _Way(functools.partial(Merged, torch.maximum), _as_it_is),
        dim_zero_min: _Way(functools.partial(Merged, torch.minimum), _as_it_is),
        dim_zero_cat: _Way(Pieces, lambda chunks: torch.cat(_joined(chunks))),
        dim_zero_mean: _Way(Rows, lambda rows: rows.double().mean(0).to(rows.dtype)),
        None: _Way(Rows, lambda rows: _reduced(rows, _as_it_is)),
    }
    return ways.get(reduction) or _Way(Rows, lambda rows: _reduced(rows, reduction))


def _reduced(rows: Tensor, reduction: Callable[[Tensor], Tensor]) -> Tensor:
    """A single chunk's state is what the metric expects of a single process: not stacked."""
    return rows[0] if len(rows) == 1 else reduction(rows)


def _joined(chunks: list[list[Tensor]]) -> list[Tensor]:
    return [piece for chunk in chunks for piece in chunk]


def _as_it_is(value: Any) -> Any:
    return value


def _moved(value: Any, device: torch.device) -> Any:
    return [element.to(device) for element in value] if isinstance(value, list) else value.to(device)


def _members(metric: "Metric | MetricCollection", *, deep: bool = True) -> dict[str, "Metric"]:
    """All metrics inside by their path, also those inside of wrappers; or a collection's own alone."""
    from torchmetrics import Metric

    modules = metric.named_modules() if deep else metric.named_children()
    return {path: module for path, module in modules if isinstance(module, Metric)}


def _states(metric: "Metric | MetricCollection") -> dict[str, tuple["Metric", str]]:
    return {
        f"{path}.{state}" if path else state: (member, state)
        for path, member in _members(metric).items()
        for state in member._defaults
    }


def _snapshot(member: "Metric", state: str) -> Tensor | list[Tensor]:
    value = getattr(member, state)
    for element in value if isinstance(value, list) else [value]:
        if not isinstance(element, Tensor):
            raise UserError(
                f"the state {state!r} of {type(member).__name__} holds a {type(element).__name__}: only tensors can be "
                "gathered from all ranks"
            )
    # A tensor in a list would be kept beyond this chunk as it is: the list itself is emptied by a reset.
    return list(value) if isinstance(value, list) else value


@contextmanager
def _clean(metric: "Metric | MetricCollection") -> Iterator[None]:
    """Every state at its default, before and after; and each member of a collection for itself.

    A collection compares its members' states after the first update, and lets those that agree share theirs from then
    on. A rank's own chunks must not decide that, nor what the collection saw earlier.
    """
    groups = getattr(metric, "_groups", None)
    if groups is not None:
        metric._groups = {}
    _reset(metric)
    try:
        yield
    finally:
        _reset(metric)
        if groups is not None:
            metric._groups = groups


def _reset(metric: "Metric | MetricCollection") -> None:
    for member in _members(metric).values():
        for state, default in member._defaults.items():
            # Anew: members of a collection may hold the same list, and a reduced state need not be a list any more.
            setattr(member, state, [] if isinstance(default, list) else default.detach().clone())
    metric.reset()


@contextmanager
def _without_synchronisation(metric: "Metric | MetricCollection") -> Iterator[None]:
    """Inside, the metric believes to be alone: its states are everyone's already."""
    members = list(_members(metric).values())
    asked_before = [member.distributed_available_fn for member in members]
    for member in members:
        member.distributed_available_fn = _is_never_distributed
    try:
        yield
    finally:
        for member, function in zip(members, asked_before, strict=True):
            member.distributed_available_fn = function


def _is_never_distributed() -> bool:
    return False


def _check(metric: Any) -> None:
    try:
        from torchmetrics import Metric, MetricCollection
        from torchmetrics.wrappers import Running
    except ImportError:
        raise UserError("Feed(…) needs torchmetrics: pip install 'lockstep-train[metrics]'") from None

    name = type(metric).__name__
    if not isinstance(metric, Metric | MetricCollection):
        raise UserError(f"Feed({name}, …): expected a torchmetrics Metric or MetricCollection, then what to feed it")
    for module in metric.modules():
        if isinstance(module, Running):
            raise UserError(f"Feed({name}, …): Running is a metric of the last few updates, not of a set of samples")
        if isinstance(module, MetricCollection) and module is not metric:
            raise UserError(f"Feed({name}, …) has a MetricCollection inside: feed the collection itself")
    if not _states(metric):
        raise UserError(f"Feed({name}, …): {name} has no states to gather; does it use add_state?")
