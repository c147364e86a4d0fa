"""The sample order: a permutation of any length, the same from any position, and a good shuffle of few samples too."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.data.sample_order import ORDER_VERSION, SampleOrder

SEEDS = st.integers(-(2**70), 2**70)
EPOCHS = st.integers(0, 2**40)


@given(st.integers(0, 5000), SEEDS, EPOCHS)
@settings(max_examples=60, deadline=None)
def test_every_sample_occurs_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(SampleOrder(length, seed, epoch).indices(0, length).tolist()) == list(range(length))


@given(st.integers(1, 2**62), SEEDS, EPOCHS, st.data())
@settings(max_examples=60, deadline=None)
def test_any_range_equals_its_elements(length: int, seed: int, epoch: int, data: st.DataObject) -> None:
    order = SampleOrder(length, seed, epoch)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, min(length, start + 100)))
    stretch = order.indices(start, stop)
    assert stretch.dtype == np.int64
    assert stretch.tolist() == [order[position] for position in range(start, stop)]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7, 64, 128, 1797])
def test_short_and_awkward_lengths_equal_their_elements(length: int) -> None:
    order = SampleOrder(length, 3, 4)
    assert order.indices(0, length).tolist() == [order[position] for position in range(length)]


def test_without_shuffling_it_is_the_natural_order() -> None:
    order = SampleOrder(10, 3, 4, shuffle=False)
    assert order.indices(2, 10).tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert order[7] == 7


def test_positions_out_of_range_are_refused() -> None:
    order = SampleOrder(10, 0, 0)
    for position in (-1, 10):
        with pytest.raises(IndexError, match=f"position {position} is outside an order of 10"):
            order[position]
    with pytest.raises(IndexError, match="positions 5 to 11"):
        order.indices(5, 11)


def test_golden_values_of_this_version() -> None:
    """Golden values. A change to what `SampleOrder` returns needs a new ORDER_VERSION, and new values here."""
    assert ORDER_VERSION == 1
    assert SampleOrder(10, 0, 0).indices(0, 10).tolist() == [0, 6, 3, 1, 5, 8, 9, 7, 4, 2]
    assert SampleOrder(1797, 7, 3).indices(1000, 1008).tolist() == [682, 668, 97, 457, 782, 1203, 1219, 1778]
    assert SampleOrder(10**12, 7, 3).indices(10**11, 10**11 + 4).tolist() == [
        802819953194,
        751552901094,
        439219595077,
        985476919220,
    ]


def is_as_expected(counts: np.ndarray, expected: float, degrees: int) -> bool:
    """Whether counts pass a chi-square test, by its normal approximation, within six standard deviations."""
    chi_square = ((counts - expected) ** 2).sum() / expected
    return bool(abs(chi_square - degrees) < 6 * math.sqrt(2 * degrees))


@pytest.mark.parametrize(("length", "epochs"), [(2, 2000), (3, 2000), (5, 2000), (7, 2000), (64, 2000), (128, 4000)])
def test_a_good_shuffle(length: int, epochs: int) -> None:
    orders = np.stack([SampleOrder(length, 1, epoch).indices(0, length) for epoch in range(epochs)])

    at_position = np.zeros((length, length))
    np.add.at(at_position, (np.arange(length)[None], orders), 1)
    assert is_as_expected(at_position, epochs / length, (length - 1) ** 2), "an index prefers some positions"

    if length > 2:
        steps = np.bincount((np.diff(orders) % length).ravel(), minlength=length)[1:]
        assert is_as_expected(steps, epochs, length - 2), "neighbours follow each other by a rule"

    equal = (orders[1:] == orders[:-1]).sum() / (epochs - 1)
    assert abs(equal - 1) < 6 / math.sqrt(epochs - 1), "epochs resemble each other"


def test_all_orders_of_four_samples_are_equally_likely() -> None:
    orders = [tuple(SampleOrder(4, 1, epoch).indices(0, 4).tolist()) for epoch in range(2400)]
    counts = np.array([orders.count(order) for order in set(orders)])
    assert len(counts) == 24
    assert is_as_expected(counts, 100, 23)


def test_orders_are_as_often_odd_as_even() -> None:
    """A Feistel network's permutations are all even: a few samples must not be all of its domain."""

    def is_odd(order: np.ndarray) -> bool:
        return bool((order[:, None] > order)[np.triu_indices(len(order))].sum() % 2)

    for length in (8, 16, 32):
        num_odd = sum(is_odd(SampleOrder(length, 1, epoch).indices(0, length)) for epoch in range(400))
        assert abs(num_odd - 200) < 60


def test_long_orders_have_no_trend() -> None:
    orders = np.stack([SampleOrder(1797, 1, epoch).indices(0, 1797) for epoch in range(100)]).astype(float)
    centred = orders - orders.mean()
    limit = 6 * centred.var() / math.sqrt(orders.size)
    assert abs((centred[:, 1:] * centred[:, :-1]).mean()) < limit, "neighbours are correlated"
    assert abs((centred[1:] * centred[:-1]).mean()) < limit, "epochs are correlated"
