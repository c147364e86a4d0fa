"""Fetch the samples of one lane from a map-style data set, with random numbers keyed by sample.

The same code runs in this process and in worker processes, so where a sample is fetched does not change it.

[Note: sample keys] Before each `dataset[index]`, the global generators of torch, numpy and `random` are seeded with
(seed, epoch, index). A data set with `__getitems__` fetches many samples at once and can only be seeded once for all of
them, with (seed, epoch, first index of the lane). So its random numbers depend on how batches are split into lanes,
which is part of a run's numerics, but not on the number of processes or workers.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import isroutine
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from lockstep.data.sample_order import Indices
from lockstep.errors import UserError
from lockstep.supervision import heartbeat
from lockstep.world.keyed_random import key_of, preserve_rng_states, seed_cpu_rngs

Collate: TypeAlias = Callable[[list[Any]], Any]


class LaneRequest(NamedTuple):
    """A request for the samples of one lane. `indices` come from the source's `rows`: a list, or an index tensor."""

    epoch: int
    lane: int
    indices: Any


class Source(Protocol):
    """A map-style data set that is read lane by lane."""

    @property
    def dataset(self) -> Any:
        """The data set."""

    def rows(self, indices: Indices) -> Sequence[Any]:
        """The rows of a matrix of indices, one per lane, in the form that a request holds."""

    def fetch(self, request: LaneRequest) -> Any:
        """The lane's samples, collated; None for an empty lane."""


def create_source(dataset: Any, collate: Collate | None, seed: int, in_process: bool = True) -> Source:
    """The fastest source for this data set; all give the same samples.

    Args:
        dataset: a map-style data set.
        collate: turns a list of samples into a batch; None for torch's default.
        seed: the seed of the random numbers that the data set draws.
        in_process: is it read in this process, not in workers?
    """
    if collate is None and (table := _table_of(dataset)) is not None:
        # A worker would get an index tensor as a file in shared memory; a list is cheaper to send.
        return TensorSource(dataset, *table, tensor_indices=in_process)
    return SampleSource(dataset, default_collate if collate is None else collate, seed)


def is_iterable(dataset: Any) -> bool:
    """Is this an iterable data set, rather than one that can be indexed?"""
    if isinstance(dataset, IterableDataset) or callable(getattr(dataset, "lane", None)):
        return True
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")


def dataset_length(dataset: Any) -> int:
    """The length of a map-style data set."""
    name = type(dataset).__name__
    if isroutine(dataset):
        raise UserError(
            f"{dataset.__name__} is a function, not a data set: give an IterableDataset whose __iter__ yields samples"
        )
    if is_iterable(dataset):
        raise UserError(f"{name} is an iterable data set: this needs a map-style one, with __len__ and __getitem__")
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        raise UserError(f"{name} has no length: give it a __len__, or make it an IterableDataset") from None


def custom_collate(loader: DataLoader[Any]) -> Collate | None:
    """The collate function of a DataLoader; None if it is torch's default."""
    return None if loader.collate_fn is default_collate else loader.collate_fn


class TensorSource:
    """A `TensorDataset`, possibly inside `Subset`s: one indexing operation per tensor, and no seeding.

    Args:
        dataset: the data set.
        tensors: the data set's tensors.
        subset: the rows of them to use; None for all.
        tensor_indices: do requests hold their indices as a tensor, rather than a list?
    """

    def __init__(self, dataset: Any, tensors: Sequence[Tensor], subset: Tensor | None, *, tensor_indices: bool) -> None:
        self.dataset = dataset
        self._tensors = tuple(tensors)
        self._subset = subset
        self._is_on_cpu = all(tensor.is_cpu for tensor in self._tensors)  # they may already be on the device
        self._tensor_indices = tensor_indices

    def rows(self, indices: Indices) -> Sequence[Any]:
        return torch.from_numpy(indices).unbind(0) if self._tensor_indices else indices.tolist()

    def fetch(self, request: LaneRequest) -> Any:
        indices = request.indices if self._tensor_indices else torch.tensor(request.indices, dtype=torch.int64)
        if not indices.numel():
            return None
        if self._subset is not None:
            indices = self._subset.index_select(0, indices)
        # A list, as default_collate makes one of tuples.
        if self._is_on_cpu:
            return [tensor.index_select(0, indices) for tensor in self._tensors]
        return [tensor.index_select(0, indices.to(tensor.device)) for tensor in self._tensors]


class SampleSource:
    """Any other data set, read sample by sample, or many at once with its `__getitems__`. [Note: sample keys]"""

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seed = seed
        self._fetches_many = _fetches_many(dataset)

    def rows(self, indices: Indices) -> Sequence[Any]:
        rows: list[list[int]] = indices.tolist()
        return rows

    def fetch(self, request: LaneRequest) -> Any:
        epoch, lane, indices = request
        if not indices:
            return None
        with preserve_rng_states():
            read = self._read_many if self._fetches_many else self._read_each
            samples = read(epoch, lane, indices)
            with note_on_error(f"collating the samples {_listed(indices)} (epoch {epoch}, lane {lane})"):
                return self._collate(samples)

    def _read_each(self, epoch: int, lane: int, indices: list[int]) -> list[Any]:
        samples = []
        for index in indices:
            seed_cpu_rngs(key_of(self._seed, "sample", epoch, index))
            heartbeat.enter_sample(index)
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                error.add_note(f"lockstep: while reading sample {index} of the data set (epoch {epoch}, lane {lane})")
                raise
        heartbeat.leave_samples()
        return samples

    def _read_many(self, epoch: int, lane: int, indices: list[int]) -> list[Any]:
        seed_cpu_rngs(key_of(self._seed, "samples", epoch, indices[0]))
        heartbeat.enter_sample(indices[0])
        with note_on_error(f"reading the samples {_listed(indices)} of the data set (epoch {epoch}, lane {lane})"):
            samples: list[Any] = self.dataset.__getitems__(indices)
        heartbeat.leave_samples()
        return samples


def _table_of(dataset: Any) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """The tensors of a data set and the rows of them that it uses; None if it is not a plain table of tensors."""
    if isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__:
        plain = all(type(tensor) is Tensor and tensor.layout is torch.strided for tensor in dataset.tensors)
        return (dataset.tensors, None) if plain and not hasattr(dataset, "__getitems__") else None
    if isinstance(dataset, Subset) and _is_plain_subset(dataset) and (inner := _table_of(dataset.dataset)) is not None:
        tensors, rows = inner
        chosen = torch.as_tensor(list(dataset.indices), dtype=torch.int64)
        num_rows = len(tensors[0]) if rows is None else len(rows)
        chosen = torch.where(chosen < 0, chosen + num_rows, chosen)  # negative indices count from the end
        return tensors, chosen if rows is None else rows[chosen]
    return None


def _fetches_many(dataset: Any) -> bool:
    """Does the data set itself define `__getitems__`? A `Subset` only forwards that of its data set."""
    if isinstance(dataset, Subset) and type(dataset).__getitems__ is Subset.__getitems__:
        return _is_plain_subset(dataset) and _fetches_many(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _is_plain_subset(dataset: Subset[Any]) -> bool:
    cls = type(dataset)
    return cls.__getitem__ is Subset.__getitem__ and cls.__getitems__ is Subset.__getitems__


@contextmanager
def note_on_error(doing: str) -> Iterator[None]:
    """Add to any error raised in the block a note that says what lockstep was doing."""
    try:
        yield
    except Exception as error:
        error.add_note(f"lockstep: while {doing}")
        raise


def _listed(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:8]))
    return f"{shown}, … ({len(indices)} in all)" if len(indices) > 8 else shown
