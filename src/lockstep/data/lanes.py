"""Lanes: how an epoch is split into global batches, a global batch into lanes, and the lanes over the ranks.

What is computed belongs to the lanes, so it never depends on which rank computes it. All of this is arithmetic on
positions; `sample_order.py` decides which sample is at a position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from lockstep.config.plurals import count_noun
from lockstep.errors import UserError

_AUTOMATIC_LANES = 8

Tail = Literal["drop", "short", "pad"]


class LaneBatch(NamedTuple):
    """One lane's share of a global batch."""

    lane: int
    data: Any  # collated, on the device; None if the lane is empty (padding counts as samples here)
    size: int  # the number of samples, without padding; 0 if the lane is empty
    weight: Tensor | None  # with tail "pad": 1.0 for each sample, 0.0 for each row of padding (float32)


class GlobalBatch(NamedTuple):
    """One global batch, as a loader yields it: only the lanes that this rank runs."""

    number: int  # counts from 0 over all epochs of the run
    epoch: int  # from 0
    size: int  # the number of samples over all lanes of all ranks, without padding
    lanes: tuple[LaneBatch, ...]  # this rank's, in lane order


@dataclass(frozen=True)
class Lanes:
    """`count` lanes (a power of two), and for each rank the contiguous range of lanes that it runs."""

    count: int
    shares: tuple[range, ...]

    def of(self, rank: int) -> range:
        """The lanes of a rank."""
        return self.shares[rank]

    def owner(self, lane: int) -> int:
        """The rank that runs a lane."""
        return next(rank for rank, share in enumerate(self.shares) if lane in share)

    @property
    def speed_up_bound(self) -> float:
        """The speed-up over one process is at most this: a step waits for the rank with the most lanes."""
        return self.count / max(map(len, self.shares))


def choose_lanes(global_batch: int) -> int:
    """What `lanes: auto` means. It must not depend on the number of processes: that would change the numerics."""
    lanes = _AUTOMATIC_LANES
    while global_batch % lanes:
        lanes //= 2
    return lanes


def share_lanes(count: int, num_ranks: int, lanes_per_rank: Sequence[int] | None = None) -> Lanes:
    """Split `count` lanes over the ranks: evenly, or by `lanes_per_rank` if their devices differ in speed."""
    if count < 1 or count & (count - 1):
        raise UserError(f"lanes={count}: expected a power of two")
    if lanes_per_rank is None:
        if num_ranks > count:
            raise UserError(
                f"{num_ranks} processes cannot share lanes={count}: start at most {count}, "
                f"or set lanes={1 << (num_ranks - 1).bit_length()} or more (which changes the numerics)"
            )
        block = _block_size(count, num_ranks)
        num_blocks = count // block
        bounds = [block * (num_blocks * rank // num_ranks) for rank in range(num_ranks + 1)]
    else:
        if len(lanes_per_rank) != num_ranks or sum(lanes_per_rank) != count or min(lanes_per_rank) < 1:
            raise UserError(
                f"lanes_per_rank={list(lanes_per_rank)}: expected one number of 1 or more for each of "
                f"{num_ranks} processes, with the sum {count}"
            )
        bounds = [sum(lanes_per_rank[:rank]) for rank in range(num_ranks + 1)]
    return Lanes(count, tuple(range(start, stop) for start, stop in pairwise(bounds)))


def _block_size(count: int, num_ranks: int) -> int:
    """The largest power of two such that blocks of this many lanes can be shared without more lanes on any rank.

    Ranges that start and stop at its multiples are covered by fewer nodes of the lane tree, so fewer bytes are sent:
    16 lanes on 3 ranks are 5 nodes as 4 + 6 + 6, and 7 nodes as 5 + 5 + 6.
    """
    most = -(-count // num_ranks)  # lanes of the busiest rank
    block = 1
    while count // (2 * block) >= num_ranks and -(-count // (2 * block) // num_ranks) * 2 * block == most:
        block *= 2
    return block


def check_tail(tail: str) -> None:
    """Raise unless `tail` is one of the known options."""
    if tail not in get_args(Tail):
        raise UserError(f"tail={tail!r}: expected one of {', '.join(get_args(Tail))}")


def check_batch(global_batch: int, num_lanes: int) -> None:
    """Raise unless `global_batch` samples can be split equally into the lanes."""
    if global_batch < 1:
        raise UserError(f"global_batch={global_batch}: expected 1 or more")
    if num_lanes > 0 and global_batch % num_lanes:
        fitting = num_lanes
        while global_batch % fitting:
            fitting //= 2
        raise UserError(
            f"global_batch={global_batch} cannot be split equally into lanes={num_lanes}: "
            f"use a multiple of {num_lanes}, or set lanes={fitting}"
        )


def check_batch_range(start: int, stop: int | None) -> None:
    """Raise unless `start` and `stop` are a range of batch numbers."""
    if start < 0 or (stop is not None and stop < start):
        raise UserError(f"batches({start}, {stop}): expected 0 <= start <= stop")


@dataclass(frozen=True)
class Batching:
    """How an epoch of `length` positions is split. Batches count from 0 within the epoch; all but the last are full."""

    length: int
    global_batch: int
    num_lanes: int
    tail: Tail

    def __post_init__(self) -> None:
        check_tail(self.tail)
        check_batch(self.global_batch, self.num_lanes)
        if self.length == 0:
            raise UserError("the training data set is empty")
        if self.tail == "drop" and self.global_batch > self.length:
            raise UserError(
                f"global_batch={self.global_batch} is larger than the training data set "
                f"({count_noun(self.length, 'sample')}), and tail='drop' drops what does not fill a batch: "
                "use a smaller batch, or tail='short' or 'pad'"
            )

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self.num_full if self.tail == "drop" else -(-self.length // self.global_batch)

    @property
    def has_empty_lanes(self) -> bool:
        """Does an epoch's last batch have lanes without samples?"""
        return self.tail == "short" and 0 < self.length % self.global_batch < self.num_lanes

    @property
    def num_full(self) -> int:
        """The number of full batches in an epoch."""
        return self.length // self.global_batch

    @property
    def lane_batch(self) -> int:
        """The number of samples in a lane of a full batch."""
        return self.global_batch // self.num_lanes

    def positions(self, batch: int) -> range:
        """The positions of a batch."""
        start = batch * self.global_batch
        return range(start, min(start + self.global_batch, self.length))

    def dropped(self) -> range:
        """The positions that no batch contains."""
        return range(self.num_full * self.global_batch if self.tail == "drop" else self.length, self.length)

    def lane(self, batch: int, lane: int) -> range:
        """The positions of a lane. With tail "pad" they may be beyond the epoch's end; those are padding."""
        start = batch * self.global_batch
        remaining = self.length - start
        if remaining >= self.global_batch or self.tail == "pad":
            return range(start + lane * self.lane_batch, start + (lane + 1) * self.lane_batch)
        # Spread evenly: if the first lanes were filled up, one could get a single sample, on which batch norm fails.
        return range(start + remaining * lane // self.num_lanes, start + remaining * (lane + 1) // self.num_lanes)

    def lane_size(self, batch: int, lane: int) -> int:
        """The number of samples in a lane, without padding."""
        positions = self.lane(batch, lane)
        return max(min(positions.stop, self.length) - positions.start, 0)
