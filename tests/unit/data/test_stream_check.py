"""Marks of rows: equal for equal rows in any process, and hardly ever for others."""

from collections import OrderedDict
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.data.stream_check import NO_ROW, mark_of

ROWS = [
    (torch.arange(6.0).view(2, 3), 1),
    (torch.arange(6.0).view(3, 2), 1),
    (torch.arange(6.0).view(2, 3), 2),
    (torch.arange(6).view(2, 3), 1.5),
    np.arange(5),
    {"text": "a line", "number": 3},
    {"text": "another line", "number": 3},
    {"text": "a line"},
    ["a", "b"],
    ["ab"],
    b"bytes",
    None,
    3,
    -3,
    torch.tensor(3.0),
    torch.zeros(0),
]


def test_different_rows_have_different_marks() -> None:
    for (i, one), (j, other) in product(enumerate(ROWS), repeat=2):
        assert (mark_of(one) == mark_of(other)) == (i == j)


def test_a_mark_is_never_that_of_a_missing_row() -> None:
    assert all(mark_of(number) > NO_ROW for number in range(5000))


def test_the_order_of_a_dictionary_does_not_count() -> None:
    assert mark_of({"a": 1, "b": 2}) == mark_of({"b": 2, "a": 1})
    assert mark_of(OrderedDict(a=1, b=2)) == mark_of(OrderedDict(b=2, a=1))


class Own:
    """Has another `repr` in each process."""


@pytest.mark.parametrize(
    "make",
    [Own, lambda: {Own(): 1}, lambda: {"a", "b"}, lambda: torch.eye(3).to_sparse(), lambda: iter([1])],
    ids=["object", "object as key", "set", "sparse", "iterator"],
)
def test_what_cannot_be_compared_counts_by_its_type(make: Any) -> None:
    assert mark_of((make(), "text")) == mark_of((make(), "text"))


def test_a_difference_anywhere_in_a_large_tensor_is_usually_seen_and_costs_little() -> None:
    image = torch.zeros(3, 200, 200)
    brighter = image.clone()
    brighter[:, 100:] = 1.0
    assert mark_of(image) != mark_of(brighter)
    assert mark_of(list(range(10**6))) == mark_of(list(range(10**6)))
