"""Which designs are better: by one cost, or by several at once (fronts and crowding, as in NSGA-II).

Costs are a row a design and a column an objective; smaller is better. A design that failed has inf in all columns and
comes last.
"""

import torch
from torch import Tensor

from lockstep.search.fronts import fronts_of


def best_first(costs: Tensor) -> Tensor:
    """The rows in order: by their front, in a front the least crowded first, and among equals the earlier row."""
    return survivors(costs, len(costs))


def survivors(costs: Tensor, count: int) -> Tensor:
    """The rows of the `count` best, best first.

    The front that does not fit as a whole is thinned out in rounds: crowding is measured again when half of those that
    must go have gone, because who is left is less crowded then.
    """
    if costs.shape[1] == 1:
        return costs[:, 0].argsort(stable=True)[:count]
    fronts = fronts_of(costs)
    last = int(torch.searchsorted(fronts.bincount().cumsum(0), count))
    kept = (fronts < last).nonzero()[:, 0]
    thinned = (fronts == last).nonzero()[:, 0]
    while (surplus := len(kept) + len(thinned) - count) > 0:
        room = crowding(costs[thinned], fronts[thinned])
        roomiest = room.argsort(descending=True, stable=True)[: -((surplus + 1) // 2)]
        thinned = thinned[roomiest.sort().values]
    rows = torch.cat([kept, thinned])
    rows = rows[crowding(costs[rows], fronts[rows]).argsort(descending=True, stable=True)]
    return rows[fronts[rows].argsort(stable=True)]


def crowding(costs: Tensor, fronts: Tensor) -> Tensor:
    """How much room each has in its front: the distance of its two neighbours, summed over columns; inf at the ends.

    A column counts by its range in the front. Those that failed have none.
    """
    room = torch.zeros(len(costs), dtype=torch.float64)
    good = costs.isfinite().all(1).nonzero()[:, 0]
    if not len(good):
        return room
    for column in (costs / 2).unbind(1):  # halves, so that no difference is more than a number can be
        order = good[column[good].argsort(stable=True)]
        order = order[fronts[order].argsort(stable=True)]
        value, front = column[order], fronts[order]
        is_edge = torch.ones(len(order) + 1, dtype=torch.bool)
        is_edge[1:-1] = front[1:] != front[:-1]
        is_first, is_last = is_edge[:-1], is_edge[1:]
        extent = value[is_last] - value[is_first]
        extent = torch.where(extent > 0, extent, 1.0)[is_first.cumsum(0) - 1]
        distance = torch.full_like(value, torch.inf)
        distance[1:-1] = (value[2:] - value[:-2]) / extent[1:-1]
        room[order] += torch.where(is_first | is_last, torch.inf, distance)
    return room
