"""`MetricAggregator`: collects what every batch contributes to each metric, and computes the results over all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from lockstep.errors import LockstepError, UserError
from lockstep.metrics.accumulators import Accumulator
from lockstep.metrics.averages import Mean, Number
from lockstep.world.collectives import get_rank
from lockstep.world.object_collectives import all_gather_object, gather_object

_MAX_BYTES = 8 * 2**30  # of one metric on one rank


@runtime_checkable
class Contribution(Protocol):
    """What one chunk contributes to a metric. Any object with these three methods is a metric.

    It is made from a chunk's tensors. `value` extracts what has to be collected, `accumulator` says how it is collected
    over chunks and ranks, and `result` computes the metric from what was collected.
    """

    def value(self, device: torch.device) -> Any:
        """This chunk's value for the accumulator. Must not wait for the device: it is called for every chunk."""
        ...

    def accumulator(self) -> Accumulator:
        """A new, empty accumulator for such values."""
        ...

    def result(self, collected: Any) -> Any:
        """The metric: a number, tensors or lists of numbers, or a mapping of those.

        Called once, with what the accumulator has collected, on one rank and on the CPU; the other ranks are sent the
        result.
        """
        ...


MetricValue = tuple[Number, Number] | Contribution  # what a metrics function returns for a metric


@dataclass(frozen=True)
class _Metric:
    first_chunk: int
    contribution: Contribution  # the first chunk's
    accumulator: Accumulator


class MetricAggregator:
    """Metrics over every sample of every rank, with the same bits whichever rank ran which chunk.

    Each metric is computed on the rank that ran its first chunk, and the result is sent to all: a rank that ran no
    chunk does not know which metrics there are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._metrics: dict[str, _Metric] = {}

    def add(self, chunk: int, values: Mapping[str, MetricValue]) -> None:
        """Add what a chunk contributes to each metric."""
        for name, value in values.items():
            try:
                contribution = _as_contribution(value)
                metric = self._metrics.get(name)
                if metric is None:
                    metric = self._metrics[name] = _Metric(chunk, contribution, contribution.accumulator())
                _check_kinds(_kind(metric.contribution), _kind(contribution))
                metric.accumulator.add(chunk, contribution.value(self._device))
            except UserError as error:
                raise _of_metric(name, error) from None

    def results(self) -> dict[str, Any]:
        """The results by name, the same on every rank: floats, or nested lists of numbers.

        A metric with several results has one entry for each, under `name/result`. A collective: all ranks call it.
        """
        known = all_gather_object(
            {name: [metric.first_chunk, _kind(metric.contribution)] for name, metric in self._metrics.items()}
        )
        first: dict[str, tuple[int, int]] = {}  # the first chunk of each metric, and its rank
        for rank, theirs in enumerate(known):
            for name, (chunk, _) in theirs.items():
                first[name] = min(first.get(name, (chunk, rank)), (chunk, rank))
        outcomes: dict[str, Any] = {}
        failure: Exception | None = None
        for name, (_, rank) in first.items():
            metric = self._metrics.get(name)
            packets = gather_object(None if metric is None else metric.accumulator.packet(), rank, _MAX_BYTES)
            if packets is None or metric is None:
                continue
            try:
                _check_kinds(*(theirs[name][1] for theirs in known if name in theirs))
                collected = metric.accumulator.merged([packet for packet in packets if packet is not None])
                outcomes[name] = {"result": _plain(metric.contribution.result(collected))}
            except UserError as error:
                outcomes[name] = {"refused": str(_of_metric(name, error))}
            except Exception as error:  # raised below, once the other ranks have an answer
                failure = failure or error
                outcomes[name] = {"failed": f"metric {name!r} failed on rank {get_rank()}: {error}"}
        return self._shared_results(first, outcomes, failure)

    def _shared_results(
        self, names: Mapping[str, Any], outcomes: dict[str, Any], failure: Exception | None
    ) -> dict[str, Any]:
        all_outcomes = {name: outcome for theirs in all_gather_object(outcomes) for name, outcome in theirs.items()}
        if failure is not None:
            raise failure
        results: dict[str, Any] = {}
        for name in sorted(names, key=lambda name: names[name]):  # stable: within a chunk, the user's order
            outcome = all_outcomes[name]
            if "refused" in outcome:
                raise UserError(outcome["refused"])
            if "failed" in outcome:
                raise LockstepError(outcome["failed"])
            results |= _flat(name, outcome["result"])
        return results


def _as_contribution(value: Any) -> Contribution:
    if isinstance(value, Contribution):
        return value
    if isinstance(value, tuple | list) and len(value) == 2:
        return Mean(*value)
    raise UserError(
        f"a {type(value).__name__} is not a metric value: return (sum, count) or one of lockstep.metrics; "
        "wrap a torchmetrics metric as TorchMetric(metric, …)"
    )


def _kind(contribution: Contribution) -> str:
    return type(contribution).__name__


def _check_kinds(*kinds: str) -> None:
    for kind in kinds:
        if kind != kinds[0]:
            raise UserError(f"one batch gave a {kinds[0]}, another a {kind}: give the same kind for every batch")


def _of_metric(name: str, error: UserError) -> UserError:
    return UserError(f"metric {name!r}: {error}")


def _plain(value: Any) -> Any:
    """A result as it is written to events: floats, nested lists, dictionaries by name."""
    if isinstance(value, Tensor):
        return float(value) if value.dim() == 0 else value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [element if isinstance(element, int) else _plain(element) for element in value]
    return float(value)


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Nested results as one mapping: `{"a": {"b": 1}}` of a metric `m` is `{"m/a/b": 1}`."""
    if not isinstance(value, dict):
        return {name: value}
    results: dict[str, Any] = {}
    for key, nested in value.items():
        results |= _flat(f"{name}/{key}", nested)
    return results
