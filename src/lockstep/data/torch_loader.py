"""`TorchLoader`: a torch DataLoader in its own order, for samplers that lockstep cannot rebuild."""

import logging
from collections.abc import Generator, Iterator, Mapping
from itertools import count
from typing import Any, Literal

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from lockstep.config.plurals import count_noun
from lockstep.data.device_prefetch import prefetch_to_device
from lockstep.data.iterable_loader import all_reduce_int
from lockstep.data.lanes import GlobalBatch, LaneBatch, Lanes, check_batch_range
from lockstep.data.stream_check import mark_of, sum_size_and_compare
from lockstep.errors import UserError
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

Uneven = Literal["cut", "join"]

_END = object()


class TorchLoader:
    """A DataLoader used as it is, one lane per rank: no exact resume, and the result depends on the number of ranks.

    `batches(start)` begins at epoch `start // len(loader)` and discards the batches before `start` in it; if the
    DataLoader has no length, it reads all earlier epochs. Sizes are estimates: the length of a batch's first tensor,
    times the number of ranks.

    Args:
        loader: the DataLoader.
        world: this process's place in the job.
        uneven: what happens if ranks have different numbers of batches: "cut" ends every epoch with the rank that has
            the fewest; "join" ends it with the one that has the most, and the others take part without samples.
    """

    exact = False  # the batches change with the number of processes, and after an interruption

    def __init__(self, loader: DataLoader[Any], world: World, *, uneven: Uneven = "cut") -> None:
        self.joins = uneven == "join"
        self.dataset = loader.dataset
        self.lanes = Lanes(world.size, tuple(range(rank, rank + 1) for rank in range(world.size)))
        self.global_batch = None if loader.batch_size is None else loader.batch_size * world.size
        self.tail = "drop" if loader.drop_last else "short"
        self._loader = loader
        self._world = world
        self._length = self._agreed_length()
        if world.is_main:
            logger.warning(
                "this DataLoader's own order is used (%s): fast mode, no exact resume",
                type(_what_orders(loader)).__name__,
            )

    def __len__(self) -> int:
        """The number of batches in an epoch, the same on all ranks."""
        if self._length is None:
            raise TypeError("this DataLoader has no length: count steps instead of epochs")
        return self._length

    def batches(self, start: int = 0, stop: int | None = None) -> Iterator[GlobalBatch]:
        """The batches from number `start` up to `stop`, counted over all epochs; endless without a `stop`."""
        check_batch_range(start, stop)
        return prefetch_to_device(self._batches(start, stop), self._world.device)

    def describe(self) -> dict[str, Any]:
        """Like a LaneLoader's, but which samples a batch contains is not known."""
        return {"kind": "foreign", "tail": self.tail}

    def state_dict(self) -> dict[str, Any]:
        """Empty: a DataLoader has no position to save."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Accept an empty state; refuse that of an iterable data set."""
        if state:
            raise UserError(
                "the saved position is that of an iterable data set, and this is a DataLoader in its own order: "
                "resume with the data set that the run was started with"
            )

    def _batches(self, start: int, stop: int | None) -> Generator[GlobalBatch, None, None]:
        epoch = start // self._length if self._length else 0
        number = epoch * (self._length or 0)
        is_compared = False
        while stop is None or number < stop:
            first = number
            for data in self._epoch(epoch):
                if number == stop:
                    return
                if number >= start:
                    size = 0 if data is None else _num_rows(data)
                    if not is_compared:
                        self._warn_if_all_read_the_same(data)
                        is_compared = True
                    lane = LaneBatch(self._world.rank, data, size, None)
                    yield GlobalBatch(number, epoch, self._global_size(size), (lane,))
                number += 1
            if number == first:
                raise UserError(f"epoch {epoch} of the DataLoader gave no batch: check its sampler")
            epoch += 1

    def _epoch(self, epoch: int) -> Iterator[Any]:
        """One epoch's batches, the same number on all ranks; None if this rank has no more but others do."""
        for sampler in (self._loader.batch_sampler, self._loader.sampler):
            if (set_epoch := getattr(sampler, "set_epoch", None)) is not None:
                set_epoch(epoch)
        iterator = iter(self._loader)
        for number in count() if self._length is None else range(self._length):
            data = next(iterator, _END)
            has_data = data is not _END
            if self._length is None:
                has_data = bool(all_reduce_int(int(has_data), self._deciding_rank, self._world))
            elif self.joins:
                has_data = True  # on some rank
            elif not has_data and self._world.size > 1:
                raise UserError(
                    f"the DataLoader gave {count_noun(number, 'batch')}, but its length is {self._length}: "
                    "correct its __len__, or the ranks would get out of step"
                )
            if not has_data:
                return
            yield None if data is _END else data

    def _warn_if_all_read_the_same(self, data: Any) -> None:
        """Compare a batch over the ranks. All of them call it for the first batch."""
        _, are_equal = sum_size_and_compare(0, mark_of(data), self._world)
        if are_equal and self._world.size > 1 and self._world.is_main:
            logger.warning(
                "all %d ranks read the same batch from this DataLoader, so they would train on the same samples: let "
                "its sampler shard by rank, as a DistributedSampler does, or give run.loader(…) the data set itself",
                self._world.size,
            )

    def _global_size(self, own: int) -> int:
        return all_reduce_int(own, "sum", self._world) if self.joins else own * self._world.size

    @property
    def _deciding_rank(self) -> Literal["min", "max"]:
        """Which rank ends an epoch: the one with the fewest batches or the one with the most."""
        return "max" if self.joins else "min"

    def _agreed_length(self) -> int | None:
        """The fewest (or with "join" the most) batches that any rank's DataLoader has; None if one has no length."""
        try:
            own = len(self._loader)
        except (TypeError, NotImplementedError):
            own = -1
        if all_reduce_int(own, "min", self._world) < 0:
            return None
        return all_reduce_int(own, self._deciding_rank, self._world)


def _what_orders(loader: DataLoader[Any]) -> Any:
    """Return what decides about a DataLoader's batches."""
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset
    has_usual_batches = loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler
    return loader.sampler if has_usual_batches else loader.batch_sampler


def _num_rows(data: Any) -> int:
    """The length of the first tensor in a batch; 1 if there is none."""
    tensor = _first_tensor(data)
    return len(tensor) if tensor is not None and tensor.dim() else 1


def _first_tensor(data: Any) -> Tensor | None:
    if isinstance(data, Tensor):
        return data
    elements = data.values() if isinstance(data, Mapping) else data if isinstance(data, list | tuple) else ()
    return next((tensor for element in elements if (tensor := _first_tensor(element)) is not None), None)
