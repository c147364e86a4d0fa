"""The tree of additions: the same additions whichever rank has which lanes."""

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.lane_tree import TreeNode, TreeSum, are_siblings, covering_nodes, leaf


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
    assert are_siblings(TreeNode(0, 2), TreeNode(0, 3))
    assert not are_siblings(TreeNode(0, 1), TreeNode(0, 2))
    assert not are_siblings(TreeNode(0, 3), TreeNode(0, 2))
    assert not are_siblings(TreeNode(1, 2), TreeNode(0, 3))


def test_a_block_is_covered_by_whole_subtrees() -> None:
    assert covering_nodes(range(8)) == [TreeNode(3, 0)]
    assert covering_nodes(range(2, 5)) == [TreeNode(1, 1), TreeNode(0, 4)]
    assert covering_nodes(range(5, 8)) == [TreeNode(0, 5), TreeNode(1, 3)]


@given(st.integers(0, 6), st.data())
def test_any_division_into_blocks_makes_the_same_additions(levels: int, data: st.DataObject) -> None:
    """Each block is summed separately, as a rank would; then the partial sums of all blocks are added."""
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
        assert [node for node, _ in block] == covering_nodes(range(start, stop))
        for node, part in block:
            together.push(node, part)
    assert together.total() == whole.total()


def test_the_order_of_additions_matters_to_floats() -> None:
    """Otherwise a fixed tree would not be needed."""
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    in_a_row = values[0]
    for value in values[1:]:
        in_a_row = in_a_row + value
    sums: TreeSum[torch.Tensor] = TreeSum(torch.add)
    for lane, value in enumerate(values):
        sums.push(leaf(lane), value)
    assert in_a_row != sums.total()
    assert math.isclose(in_a_row, sums.total(), abs_tol=1e-5)
