"""Lanes: the fixed parts into which every global batch is cut, and which rank runs which.

What is computed belongs to the lanes, so it never depends on who computes it; a rank runs a contiguous block of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from lockstep.errors import UserError

_AUTOMATIC_LANES = 8


@dataclass(frozen=True)
class Lanes:
    """`count` lanes (a power of two), and for each rank the range of those it runs."""

    count: int
    shares: tuple[range, ...]

    def of(self, rank: int) -> range:
        return self.shares[rank]

    def owner(self, lane: int) -> int:
        return next(rank for rank, share in enumerate(self.shares) if lane in share)

    @property
    def speed_up_bound(self) -> float:
        """No number of processes beyond this pays: the step waits for the rank with the most lanes."""
        return self.count / max(map(len, self.shares))


def choose_lanes(global_batch: int) -> int:
    """What `lanes: auto` means. It never depends on the number of processes: that would change the numerics."""
    lanes = _AUTOMATIC_LANES
    while global_batch % lanes:
        lanes //= 2
    return lanes


def share_lanes(count: int, num_ranks: int, lanes_per_rank: Sequence[int] | None = None) -> Lanes:
    """Share `count` lanes out over the ranks: evenly, or as `lanes_per_rank` weighs unequal devices."""
    if count < 1 or count & (count - 1):
        raise UserError(f"lanes={count}: expected a power of two")
    if lanes_per_rank is None:
        if num_ranks > count:
            raise UserError(
                f"{num_ranks} processes cannot share lanes={count}: start at most {count}, "
                f"or set lanes={1 << (num_ranks - 1).bit_length()} or more (which changes the numerics)"
            )
        unit = _unit(count, num_ranks)
        units = count // unit
        bounds = [unit * (units * rank // num_ranks) for rank in range(num_ranks + 1)]
    else:
        if len(lanes_per_rank) != num_ranks or sum(lanes_per_rank) != count or min(lanes_per_rank) < 1:
            raise UserError(
                f"lanes_per_rank={list(lanes_per_rank)}: expected one number of 1 or more for each of "
                f"{num_ranks} processes, {count} in all"
            )
        bounds = [sum(lanes_per_rank[:rank]) for rank in range(num_ranks + 1)]
    return Lanes(count, tuple(range(start, stop) for start, stop in pairwise(bounds)))


def _unit(count: int, num_ranks: int) -> int:
    """The largest power of two in which lanes can be dealt out without any rank getting more than it must.

    Blocks that start and stop at such multiples are covered by fewer nodes of the tree, so fewer bytes travel: 16 lanes
    on 3 ranks as 4 + 6 + 6 are 5 nodes, as 5 + 5 + 6 they would be 7.
    """
    busiest = -(-count // num_ranks)
    unit = 1
    while count // (2 * unit) >= num_ranks and -(-count // (2 * unit) // num_ranks) * 2 * unit == busiest:
        unit *= 2
    return unit
