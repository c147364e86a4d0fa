import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pymoo.util.nds.non_dominated_sorting import NonDominatedSorting
from torch import Tensor, inf

from lockstep.search.fronts import first_front, fronts_of


def pymoo_fronts(costs: Tensor) -> list[int]:
    fronts = np.empty(len(costs), dtype=int)
    for number, rows in enumerate(NonDominatedSorting().do(costs.numpy())):
        fronts[rows] = number
    return fronts.tolist()


def tables(columns: int) -> st.SearchStrategy[list[list[float]]]:
    """With many ties, equal rows and failures."""
    cost = st.integers(0, 3).map(float)
    row = st.lists(cost, min_size=columns, max_size=columns) | st.just([inf] * columns)
    return st.lists(row, min_size=1, max_size=20)


@pytest.mark.parametrize("columns", [1, 2, 3, 4])
def test_fronts_are_those_of_pymoo(columns: int) -> None:
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(tables(columns))
    def check(rows: list[list[float]]) -> None:
        costs = torch.tensor(rows, dtype=torch.float64)
        fronts = pymoo_fronts(costs)
        assert fronts_of(costs).tolist() == fronts
        assert first_front(costs).tolist() == [front == 0 for front in fronts]

    check()


@pytest.mark.parametrize("columns", [2, 3, 4])
def test_fronts_of_more_rows_than_are_compared_at_a_time(columns: int) -> None:
    costs = torch.rand(600, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert fronts_of(costs).tolist() == pymoo_fronts(costs)
    assert torch.equal(first_front(costs), fronts_of(costs) == 0)


def test_up_to_three_columns_nobody_is_compared_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("lockstep.search.fronts._dominates")
    for columns in (1, 2, 3):
        costs = torch.rand(600, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert torch.equal(first_front(costs), fronts_of(costs) == 0)


def test_a_chain_has_a_front_for_each() -> None:
    for columns in (1, 2, 3, 4):
        costs = torch.arange(300.0).flip(0)[:, None].expand(-1, columns)
        assert fronts_of(costs).tolist() == list(reversed(range(300)))


def test_of_no_designs_there_are_no_fronts() -> None:
    for columns in (1, 2, 3, 4):
        none = torch.empty(0, columns, dtype=torch.float64)
        assert len(fronts_of(none)) == len(first_front(none)) == 0
