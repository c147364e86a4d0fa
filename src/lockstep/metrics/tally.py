"""The tally of an evaluation: contributions come in chunk by chunk, results come out the same on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import LockstepError, UserError
from lockstep.metrics.average import Mean, Number
from lockstep.metrics.contribution import Contribution
from lockstep.metrics.keepers import Keeper
from lockstep.world.collectives import get_rank
from lockstep.world.objects import all_gather_object, gather_object

Part = tuple[Number, Number] | Contribution

_MAX_BYTES = 8 * 2**30  # of one metric on one rank


@dataclass(frozen=True)
class _Metric:
    first_chunk: int
    contribution: Contribution  # the first chunk's
    keeper: Keeper


class Tally:
    """Metrics over every sample of every rank. Which rank saw which chunk does not change a bit.

    Each metric is put together on the rank that saw its first chunk, and its result is told to all: a rank without any
    chunk does not know the metrics, and needs not.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._metrics: dict[str, _Metric] = {}

    def add(self, chunk: int, parts: Mapping[str, Part]) -> None:
        """Take in what a chunk contributes to each metric."""
        for name, part in parts.items():
            try:
                contribution = _as_contribution(part)
                metric = self._metrics.get(name)
                if metric is None:
                    metric = self._metrics[name] = _Metric(chunk, contribution, contribution.keeper())
                _check_kinds(_kind(metric.contribution), _kind(contribution))
                metric.keeper.add(chunk, contribution.value(self._device))
            except UserError as error:
                raise _of_metric(name, error) from None

    def results(self) -> dict[str, Any]:
        """By name: a float, or nested lists of numbers; of a metric with several results, by `name/result`."""
        known = all_gather_object(
            {name: [metric.first_chunk, _kind(metric.contribution)] for name, metric in self._metrics.items()}
        )
        first: dict[str, tuple[int, int]] = {}  # chunk and rank
        for rank, theirs in enumerate(known):
            for name, (chunk, _) in theirs.items():
                first[name] = min(first.get(name, (chunk, rank)), (chunk, rank))
        outcomes: dict[str, Any] = {}
        failure: Exception | None = None
        for name, (_, rank) in first.items():
            metric = self._metrics.get(name)
            packets = gather_object(None if metric is None else metric.keeper.packet(), rank, _MAX_BYTES)
            if packets is None or metric is None:
                continue
            try:
                _check_kinds(*(theirs[name][1] for theirs in known if name in theirs))
                kept = metric.keeper.merged([packet for packet in packets if packet is not None])
                outcomes[name] = {"result": _plain(metric.contribution.result(kept))}
            except UserError as error:
                outcomes[name] = {"refused": str(_of_metric(name, error))}
            except Exception as error:  # the others wait for an answer: it is raised once they have one
                failure = failure or error
                outcomes[name] = {"failed": f"metric {name!r} failed on rank {get_rank()}: {error}"}
        return self._agreed(first, outcomes, failure)

    def _agreed(self, names: Mapping[str, Any], outcomes: dict[str, Any], failure: Exception | None) -> dict[str, Any]:
        told = {name: outcome for theirs in all_gather_object(outcomes) for name, outcome in theirs.items()}
        if failure is not None:
            raise failure
        results: dict[str, Any] = {}
        for name in sorted(names, key=lambda name: names[name]):  # stable: within a chunk, the user's order
            if "refused" in told[name]:
                raise UserError(told[name]["refused"])
            if "failed" in told[name]:
                raise LockstepError(told[name]["failed"])
            results |= _flat(name, told[name]["result"])
        return results


def _as_contribution(part: Any) -> Contribution:
    if isinstance(part, Contribution):
        return part
    if isinstance(part, tuple | list) and len(part) == 2:
        return Mean(*part)
    raise UserError(
        f"a {type(part).__name__} is no contribution to a metric: return (sum, count), or one of lockstep.metrics; "
        "a torchmetrics metric is given as Feed(metric, …)"
    )


def _kind(contribution: Contribution) -> str:
    return type(contribution).__name__


def _check_kinds(*kinds: str) -> None:
    for kind in kinds:
        if kind != kinds[0]:
            raise UserError(f"one batch gave a {kinds[0]}, another a {kind}: give the same of every batch")


def _of_metric(name: str, error: UserError) -> UserError:
    return UserError(f"metric {name!r}: {error}")


def _plain(value: Any) -> Any:
    """A result as events hold it: floats, nested lists, dictionaries by name."""
    if isinstance(value, Tensor):
        return float(value) if value.dim() == 0 else value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        return [element if isinstance(element, int) else _plain(element) for element in value]
    return float(value)


def _flat(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {name: value}
    return {key: element for part, nested in value.items() for key, element in _flat(f"{name}/{part}", nested).items()}
