"""The tree of additions: the same for the lanes whoever owns them."""

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.tree import Node, TreeSum, are_siblings, cover, leaf


def added(left: str, right: str) -> str:
    return f"({left}+{right})"


def test_lanes_are_added_in_pairs_then_pairs_of_pairs() -> None:
    sums = TreeSum(added)
    for lane in range(8):
        sums.push(leaf(lane), str(lane))
    assert sums.total() == "(((0+1)+(2+3))+((4+5)+(6+7)))"


def test_memory_stays_logarithmic() -> None:
    sums = TreeSum(added)
    most = 0
    for lane in range(64):
        sums.push(leaf(lane), str(lane))
        most = max(most, len(sums))
    assert most == 6  # after lane 62: subtrees of 32, 16, 8, 4, 2 and 1


def test_only_children_of_one_parent_are_siblings() -> None:
    assert are_siblings(Node(0, 2), Node(0, 3))
    assert not are_siblings(Node(0, 1), Node(0, 2))
    assert not are_siblings(Node(0, 3), Node(0, 2))
    assert not are_siblings(Node(1, 2), Node(0, 3))


def test_a_block_is_covered_by_whole_subtrees() -> None:
    assert cover(range(8)) == [Node(3, 0)]
    assert cover(range(2, 5)) == [Node(1, 1), Node(0, 4)]
    assert cover(range(5, 8)) == [Node(0, 5), Node(1, 3)]


@given(st.integers(0, 6), st.data())
def test_any_cut_into_blocks_makes_the_same_additions(levels: int, data: st.DataObject) -> None:
    """Each block is summed by itself, as a rank would; what is left of all of them comes together."""
    num_lanes = 2**levels
    cuts = data.draw(st.sets(st.integers(1, max(1, num_lanes - 1)), max_size=num_lanes - 1))
    bounds = sorted({0, num_lanes, *(cut for cut in cuts if cut < num_lanes)})
    whole, together = TreeSum(added), TreeSum(added)
    for lane in range(num_lanes):
        whole.push(leaf(lane), str(lane))
    for start, stop in pairwise(bounds):
        block = TreeSum(added)
        for lane in range(start, stop):
            block.push(leaf(lane), str(lane))
        assert [node for node, _ in block] == cover(range(start, stop))
        for node, part in block:
            together.push(node, part)
    assert together.total() == whole.total()


def test_the_order_matters_to_floats() -> None:
    """Else all of this would be in vain."""
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    in_a_row = values[0]
    for value in values[1:]:
        in_a_row = in_a_row + value
    sums: TreeSum[torch.Tensor] = TreeSum(torch.add)
    for lane, value in enumerate(values):
        sums.push(leaf(lane), value)
    assert in_a_row != sums.total()
    assert math.isclose(in_a_row, sums.total(), abs_tol=1e-5)
