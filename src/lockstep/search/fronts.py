"""Non-dominated sorting: into which front a design falls by its costs, without a table of all against all.

A design dominates another if it is no worse in any cost and better in one. Rows are taken in order, by the first
column, among equals by the second, and so on: then only those before a row can dominate it. A row that a front has
something to dominate it with has the same in every lower front, so that bisection finds its own.
"""

from bisect import bisect_left, bisect_right

import torch
from torch import Tensor

_BLOCK = 256  # rows that are compared with all before them at a time: it bounds the memory


def fronts_of(costs: Tensor) -> Tensor:
    """Of each row the number of its front: 0 where no other dominates it, 1 where only those of front 0 do, and so on.

    n rows take about n log n steps for up to three columns, and n² for more.
    """
    order = _in_order(costs)
    sweep = _SWEEPS.get(costs.shape[1], _fronts_of_many)
    fronts = torch.empty(len(costs), dtype=torch.int64)
    fronts[order] = sweep(costs[order])
    return fronts


def first_front(costs: Tensor) -> Tensor:
    """Which rows no other dominates."""
    if costs.shape[1] in _SWEEPS:
        return fronts_of(costs) == 0
    # Faster than all fronts: a row is compared with those alone that are in the first.
    is_first = torch.zeros(len(costs), dtype=torch.bool)
    for block in torch.split(_in_order(costs), _BLOCK):
        rows = block[~_dominates(costs[is_first], costs[block]).any(1)]
        rows = rows[~_dominates(costs[rows], costs[rows]).any(1)]
        is_first[rows] = True
    return is_first


def _in_order(costs: Tensor) -> Tensor:
    order = torch.arange(len(costs))
    for column in reversed(costs.unbind(1)):
        order = order[column[order].argsort(stable=True)]
    return order


def _fronts_of_one(ordered: Tensor) -> Tensor:
    is_new = torch.zeros(len(ordered), dtype=torch.int64)
    is_new[1:] = (ordered[1:] > ordered[:-1])[:, 0]
    return is_new.cumsum(0)


def _fronts_of_two(ordered: Tensor) -> Tensor:
    """A front dominates by its least cost in the second column."""
    fronts: list[int] = []
    least: list[float] = []  # by front, and the larger the higher the front
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
    """A front dominates by the staircase of its least costs in the second and third column."""
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
    """The least of some pairs: as `seconds` rise, `thirds` fall."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.thirds: list[float] = []

    def dominates(self, second: float, third: float) -> bool:
        place = bisect_right(self.seconds, second)
        return place > 0 and self.thirds[place - 1] <= third

    def add(self, second: float, third: float) -> None:
        """One that is not dominated; those that it dominates leave."""
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
    """A row's front is one more than the highest among those that dominate it."""
    fronts = torch.zeros(len(ordered), dtype=torch.int64)
    for start in range(0, len(ordered), _BLOCK):
        block = slice(start, start + _BLOCK)
        if start:
            fronts[block] = _front_above(_dominates(ordered[:start], ordered[block]), fronts[:start])
        within = _dominates(ordered[block], ordered[block])
        while True:  # until those of the block that dominate each other have settled
            raised = torch.maximum(fronts[block], _front_above(within, fronts[block]))
            if torch.equal(raised, fronts[block]):
                break
            fronts[block] = raised
    return fronts


_SWEEPS = {1: _fronts_of_one, 2: _fronts_of_two, 3: _fronts_of_three}  # that need no table of all against all


def _front_above(dominates: Tensor, fronts: Tensor) -> Tensor:
    return torch.where(dominates, fronts + 1, 0).amax(1)


def _dominates(better: Tensor, worse: Tensor) -> Tensor:
    """A row for each of `worse`, a column for each of `better`."""
    is_no_worse = torch.ones(len(worse), len(better), dtype=torch.bool)
    is_better = torch.zeros_like(is_no_worse)
    for one, other in zip(better.unbind(1), worse.unbind(1), strict=True):
        is_no_worse &= one <= other[:, None]
        is_better |= one < other[:, None]
    return is_no_worse & is_better
