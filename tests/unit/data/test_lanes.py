"""Splitting lanes over the ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.lanes import choose_lanes, share_lanes
from lockstep.errors import UserError


@given(st.integers(0, 7), st.data())
def test_every_lane_has_one_rank_and_no_rank_more_than_needed(levels: int, data: st.DataObject) -> None:
    count = 2**levels
    num_ranks = data.draw(st.integers(1, count))
    lanes = share_lanes(count, num_ranks)
    assert [lane for share in lanes.shares for lane in share] == list(range(count))
    assert max(map(len, lanes.shares)) == -(-count // num_ranks)
    assert min(map(len, lanes.shares)) >= 1
    assert all(lane in lanes.of(lanes.owner(lane)) for lane in range(count))


def test_ranges_follow_the_tree_if_that_costs_nothing() -> None:
    assert [len(share) for share in share_lanes(16, 3).shares] == [4, 6, 6]
    assert [len(share) for share in share_lanes(8, 3).shares] == [2, 3, 3]


def test_lanes_per_rank() -> None:
    lanes = share_lanes(8, 3, [1, 2, 5])
    assert lanes.shares == (range(1), range(1, 3), range(3, 8))
    assert lanes.speed_up_bound == 8 / 5


@pytest.mark.parametrize(("batch", "lanes"), [(512, 8), (12, 4), (6, 2), (7, 1)])
def test_automatic_lanes_divide_the_batch(batch: int, lanes: int) -> None:
    assert choose_lanes(batch) == lanes


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(UserError, match=r"5 processes cannot share lanes=4: start at most 4, or set lanes=8 or more"):
        share_lanes(4, 5)
    with pytest.raises(UserError, match="lanes=6: expected a power of two"):
        share_lanes(6, 2)
    for shares in ([4, 4], [0, 4, 4], [1, 1, 1]):
        with pytest.raises(UserError, match="lanes_per_rank"):
            share_lanes(8, 3, shares)
