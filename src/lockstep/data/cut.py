"""How an epoch is cut into global batches, and a global batch into lanes: arithmetic on positions and nothing else."""

from dataclasses import dataclass
from typing import Literal, get_args

from lockstep.errors import UserError

Tail = Literal["drop", "short", "pad"]


def check_tail(tail: str) -> None:
    if tail not in get_args(Tail):
        raise UserError(f"tail={tail!r}: expected one of {', '.join(get_args(Tail))}")


def check_batch(global_batch: int, num_lanes: int) -> None:
    """Is `global_batch` a number of samples that so many lanes can share equally?"""
    if global_batch < 1:
        raise UserError(f"global_batch={global_batch}: expected 1 or more")
    if num_lanes > 0 and global_batch % num_lanes:
        fitting = num_lanes
        while global_batch % fitting:
            fitting //= 2
        raise UserError(
            f"global_batch={global_batch} cannot be cut into lanes={num_lanes} of equal size: "
            f"use a multiple of {num_lanes}, or set lanes={fitting}"
        )


@dataclass(frozen=True)
class Cut:
    """An epoch of `length` positions. Batches are numbered from 0 within it; all but the last are full."""

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
                f"global_batch={self.global_batch} is larger than the training data set ({self.length} samples), and "
                "tail='drop' drops what does not fill a batch: use a smaller batch, or tail='short' or 'pad'"
            )

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.num_full if self.tail == "drop" else -(-self.length // self.global_batch)

    @property
    def has_empty_lanes(self) -> bool:
        """In an epoch's last batch."""
        return self.tail == "short" and 0 < self.length % self.global_batch < self.num_lanes

    @property
    def num_full(self) -> int:
        return self.length // self.global_batch

    @property
    def lane_batch(self) -> int:
        """Samples in a lane of a full batch."""
        return self.global_batch // self.num_lanes

    def positions(self, batch: int) -> range:
        start = batch * self.global_batch
        return range(start, min(start + self.global_batch, self.length))

    def dropped(self) -> range:
        return range(self.num_full * self.global_batch if self.tail == "drop" else self.length, self.length)

    def lane(self, batch: int, lane: int) -> range:
        """The lane's positions. With tail "pad" they may lie beyond the epoch's end, where they mean padding."""
        start = batch * self.global_batch
        left = self.length - start
        if left >= self.global_batch or self.tail == "pad":
            return range(start + lane * self.lane_batch, start + (lane + 1) * self.lane_batch)
        # Spread evenly: were the first lanes filled up, one could be left with a single sample, and batch norm fails.
        return range(start + left * lane // self.num_lanes, start + left * (lane + 1) // self.num_lanes)

    def lane_size(self, batch: int, lane: int) -> int:
        """Samples in the lane, padding not counted."""
        part = self.lane(batch, lane)
        return max(min(part.stop, self.length) - part.start, 0)
