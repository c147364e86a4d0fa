"""The fixed binary tree over the lanes: the order in which every sum over lanes is taken. [Note: tree]

[Note: tree] Floating-point addition is not associative, so a sum's bits depend on the order of its additions. Here the
order depends on the lanes alone: lane 0 is added to lane 1 and 2 to 3; then (0, 1) to (2, 3); and so on up to the root:

    level 2                 (0..3)                    ((g0 + g1) + (g2 + g3))
    level 1         (0,1)           (2,3)
    level 0       0       1       2       3           one leaf for each lane

A rank adds up the subtrees that lie inside its block of lanes. The remaining additions are made between ranks, along
the same tree. Which rank has which lanes decides where an addition is made, never which additions are made. With four
lanes, lane by lane on one rank:

    push leaf 0     pending: [0]
    push leaf 1     1 is 0's sibling: add them        pending: [(0,1)]
    push leaf 2     pending: [(0,1), 2]
    push leaf 3     add 2 and 3, then (0,1) and (2,3) pending: [(0..3)]

On three ranks with lanes {0}, {1}, {2, 3}, each rank ends with one pending node: 0, 1 and (2,3). Pushing these in order
makes the two remaining additions. On three ranks with lanes {0}, {1, 2}, {3}, the middle rank ends with
two nodes, 1 and 2: they are neighbours but not siblings, so it must not add them.
"""

from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

TREE_VERSION = 1  # of the order of additions; a run keeps the version it began with


class TreeNode(NamedTuple):
    """The subtree over lanes [position · 2^level, (position + 1) · 2^level)."""

    level: int
    position: int  # from the left, among the nodes of its level

    @property
    def parent(self) -> "TreeNode":
        return TreeNode(self.level + 1, self.position // 2)


def leaf(lane: int) -> TreeNode:
    """Return the node of a single lane."""
    return TreeNode(0, lane)


def are_siblings(left: TreeNode, right: TreeNode) -> bool:
    """Return whether two nodes are the left and the right child of one parent."""
    return left.level == right.level and left.position % 2 == 0 and right.position == left.position + 1


def covering_nodes(lanes: range) -> list[TreeNode]:
    """Return the fewest whole subtrees that make up a block of lanes, from left to right."""
    nodes = []
    start = lanes.start
    while start < lanes.stop:
        level = (lanes.stop - start).bit_length() - 1
        while start % (1 << level):
            level -= 1
        nodes.append(TreeNode(level, start >> level))
        start += 1 << level
    return nodes


class TreeSum(Generic[T]):
    """A sum along the tree, fed from left to right. Keeps a logarithmic number of partial sums."""

    def __init__(self, add: Callable[[T, T], T]) -> None:
        self._add = add
        self._pending: list[tuple[TreeNode, T]] = []  # partial sums that wait for their right siblings

    def push(self, node: TreeNode, value: T) -> None:
        """Add the next node's value. Whenever that completes a pair of siblings, they are merged into their parent."""
        while self._pending and are_siblings(self._pending[-1][0], node):
            value = self._add(self._pending.pop()[1], value)
            node = node.parent
        self._pending.append((node, value))

    def pop(self) -> tuple[TreeNode, T]:
        """Take out the rightmost partial sum, for a caller that adds to it itself."""
        return self._pending.pop()

    @property
    def last_node(self) -> TreeNode | None:
        """The rightmost node with a partial sum."""
        return self._pending[-1][0] if self._pending else None

    def __iter__(self) -> Iterator[tuple[TreeNode, T]]:
        return iter(self._pending)

    def __len__(self) -> int:
        return len(self._pending)

    def total(self) -> T:
        """Return the sum over all lanes: by now the only partial sum."""
        ((_, value),) = self._pending
        return value
