"""Compare designs by several costs: non-dominated sorting, crowding distance and survivor selection (NSGA-II).

Costs have a row per design and a column per objective; smaller is better. A failed design has inf in all columns and
comes last. A design dominates another if it is no worse in any cost and better in one.

Sorting needs no table of all pairs. Rows are visited in lexicographic order of their costs, so only earlier rows can
dominate a row; and a row that some front dominates is dominated by every lower front too, so bisection finds its front.
"""

from bisect import bisect_left, bisect_right

import torch
from torch import Tensor

_BLOCK = 256  # rows compared with all earlier ones at a time: bounds the memory


def nondominated_fronts(costs: Tensor) -> Tensor:
    """Return the front of each row: 0 if no row dominates it, 1 if only rows of front 0 do, and so on.

    Takes O(n log n) steps for up to three columns, and O(n²) for more.
    """
    order = _in_lexicographic_order(costs)
    sweep = _SWEEPS.get(costs.shape[1], _fronts_of_many)
    fronts = torch.empty(len(costs), dtype=torch.int64)
    fronts[order] = sweep(costs[order])
    return fronts


def is_nondominated(costs: Tensor) -> Tensor:
    """Return a mask of the rows that no other row dominates: the Pareto front."""
    if costs.shape[1] in _SWEEPS:
        return nondominated_fronts(costs) == 0
    # Faster than sorting all fronts: rows are compared only with those of the first front.
    is_first = torch.zeros(len(costs), dtype=torch.bool)
    for block in torch.split(_in_lexicographic_order(costs), _BLOCK):
        rows = block[~_dominates(costs[is_first], costs[block]).any(1)]
        rows = rows[~_dominates(costs[rows], costs[rows]).any(1)]
        is_first[rows] = True
    return is_first


def _in_lexicographic_order(costs: Tensor) -> Tensor:
    order = torch.arange(len(costs))
    for column in reversed(costs.unbind(1)):
        order = order[column[order].argsort(stable=True)]
    return order


def _fronts_of_one(ordered: Tensor) -> Tensor:
    is_new = torch.zeros(len(ordered), dtype=torch.int64)
    is_new[1:] = (ordered[1:] > ordered[:-1])[:, 0]
    return is_new.cumsum(0)


def _fronts_of_two(ordered: Tensor) -> Tensor:
    """A front dominates a row if the least cost in its second column does."""
    fronts: list[int] = []
    least: list[float] = []  # by front; increases with the front
    before = None
    for row in ordered.tolist():
        if row == before:  # equals do not dominate each other
            fronts.append(fronts[-1])
            continue
        front = bisect_right(least, row[1])
        least[front : front + 1] = [row[1]]
        fronts.append(front)
        before = row
    return torch.tensor(fronts, dtype=torch.int64)


def _fronts_of_three(ordered: Tensor) -> Tensor:
    """A front dominates a row if the staircase of its least costs in the second and third column does."""
    fronts: list[int] = []
    stairs: list[_Staircase] = []  # by front
    before = None
    for row in ordered.tolist():
        if row == before:
            fronts.append(fronts[-1])
            continue
        front = _first_that_does_not_dominate(stairs, row[1], row[2])
        if front == len(stairs):
            stairs.append(_Staircase())
        stairs[front].add(row[1], row[2])
        fronts.append(front)
        before = row
    return torch.tensor(fronts, dtype=torch.int64)


class _Staircase:
    """The non-dominated pairs of a front: as `seconds` rise, `thirds` fall."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.thirds: list[float] = []

    def dominates(self, second: float, third: float) -> bool:
        place = bisect_right(self.seconds, second)
        return place > 0 and self.thirds[place - 1] <= third

    def add(self, second: float, third: float) -> None:
        """Add a pair that is not dominated, and remove those that it dominates."""
        start = end = bisect_left(self.seconds, second)
        while end < len(self.thirds) and self.thirds[end] >= third:
            end += 1
        self.seconds[start:end] = [second]
        self.thirds[start:end] = [third]


def _first_that_does_not_dominate(stairs: list[_Staircase], second: float, third: float) -> int:
    low, high = 0, len(stairs)
    while low < high:
        middle = (low + high) // 2
        if stairs[middle].dominates(second, third):
            low = middle + 1
        else:
            high = middle
    return low


def _fronts_of_many(ordered: Tensor) -> Tensor:
    """A row's front is one above the highest front among the rows that dominate it."""
    fronts = torch.zeros(len(ordered), dtype=torch.int64)
    for start in range(0, len(ordered), _BLOCK):
        block = slice(start, start + _BLOCK)
        if start:
            fronts[block] = _front_above(_dominates(ordered[:start], ordered[block]), fronts[:start])
        within = _dominates(ordered[block], ordered[block])
        while True:  # until the fronts within the block have settled
            raised = torch.maximum(fronts[block], _front_above(within, fronts[block]))
            if torch.equal(raised, fronts[block]):
                break
            fronts[block] = raised
    return fronts


_SWEEPS = {
    1: _fronts_of_one,
    2: _fronts_of_two,
    3: _fronts_of_three,
}  # by number of columns


def _front_above(dominates: Tensor, fronts: Tensor) -> Tensor:
    return torch.where(dominates, fronts + 1, 0).amax(1)


def _dominates(better: Tensor, worse: Tensor) -> Tensor:
    """A mask with a row for each of `worse` and a column for each of `better`."""
    is_no_worse = torch.ones(len(worse), len(better), dtype=torch.bool)
    is_better = torch.zeros_like(is_no_worse)
    for one, other in zip(better.unbind(1), worse.unbind(1), strict=True):
        is_no_worse &= one <= other[:, None]
        is_better |= one < other[:, None]
    return is_no_worse & is_better


def best_first(costs: Tensor) -> Tensor:
    """Return all rows sorted by front, within a front the least crowded first, and among equals the earlier first."""
    return select_survivors(costs, len(costs))


def select_survivors(costs: Tensor, count: int) -> Tensor:
    """Return the rows of the `count` best, best first.

    The front that does not fit as a whole is thinned out in rounds: each removes half of the surplus, then crowding is
    measured again, because the remaining rows are less crowded.
    """
    if costs.shape[1] == 1:
        return costs[:, 0].argsort(stable=True)[:count]
    fronts = nondominated_fronts(costs)
    last = int(torch.searchsorted(fronts.bincount().cumsum(0), count))
    kept = (fronts < last).nonzero()[:, 0]
    last_front = (fronts == last).nonzero()[:, 0]
    while (surplus := len(kept) + len(last_front) - count) > 0:
        distance = crowding_distance(costs[last_front], fronts[last_front])
        least_crowded = distance.argsort(descending=True, stable=True)[: -((surplus + 1) // 2)]
        last_front = last_front[least_crowded.sort().values]
    rows = torch.cat([kept, last_front])
    rows = rows[crowding_distance(costs[rows], fronts[rows]).argsort(descending=True, stable=True)]
    return rows[fronts[rows].argsort(stable=True)]


def crowding_distance(costs: Tensor, fronts: Tensor) -> Tensor:
    """Return each row's crowding distance: the distance between its two neighbours in its front, summed over columns.

    Columns are scaled by their range in the front. Rows at the ends of a front have inf, failed rows have 0.
    """
    total = torch.zeros(len(costs), dtype=torch.float64)
    good = costs.isfinite().all(1).nonzero()[:, 0]
    if not len(good):
        return total
    for column in (costs / 2).unbind(1):  # halved, so that no difference overflows
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
        total[order] += torch.where(is_first | is_last, torch.inf, distance)
    return total
