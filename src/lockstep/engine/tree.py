"""The fixed binary tree along which everything is summed over lanes.

[Note: tree] Floating-point addition is not associative, so a sum's bits depend on the order in which it is taken. Here
the order belongs to the lanes alone: lane 0 is added to lane 1, 2 to 3; then (0, 1) to (2, 3); and so on up to the
root. A rank adds the subtrees that lie inside its block of lanes; what is left is added between ranks, along the same
tree. Who owns which lanes then decides where an addition happens, never which additions there are.
"""

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

TREE_VERSION = 1  # of the order of additions; a run keeps to the one it began with


class Node(NamedTuple):
    """The subtree over lanes [place · 2^level, (place + 1) · 2^level)."""

    level: int
    place: int  # from the left, among the nodes of its level

    @property
    def parent(self) -> "Node":
        return Node(self.level + 1, self.place // 2)


def leaf(lane: int) -> Node:
    return Node(0, lane)


def are_siblings(left: Node, right: Node) -> bool:
    return left.level == right.level and left.place % 2 == 0 and right.place == left.place + 1


def cover(lanes: range) -> list[Node]:
    """The fewest whole subtrees that make up a block of lanes, from left to right."""
    nodes = []
    start = lanes.start
    while start < lanes.stop:
        level = (lanes.stop - start).bit_length() - 1
        while start % (1 << level):
            level -= 1
        nodes.append(Node(level, start >> level))
        start += 1 << level
    return nodes


class TreeSum(Generic[T]):
    """Partial sums waiting for their siblings. Values come in from left to right; memory stays logarithmic."""

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._waiting: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        while self._waiting and are_siblings(self._waiting[-1][0], node):
            value = self._add(self._waiting.pop()[1], value)
            node = node.parent
        self._waiting.append((node, value))

    def pop(self) -> tuple[Node, T]:
        """Take the newest partial sum out, to go on with it."""
        return self._waiting.pop()

    @property
    def newest(self) -> Node | None:
        return self._waiting[-1][0] if self._waiting else None

    def __iter__(self) -> Iterator[tuple[Node, T]]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def total(self) -> T:
        """The only partial sum left."""
        ((_, value),) = self._waiting
        return value
