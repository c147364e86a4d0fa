import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pymoo.util.nds.non_dominated_sorting import NonDominatedSorting
from torch import Tensor, inf

from lockstep.search.pareto import best_first, crowding_distance, is_nondominated, nondominated_fronts, select_survivors


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
        assert nondominated_fronts(costs).tolist() == fronts
        assert is_nondominated(costs).tolist() == [front == 0 for front in fronts]

    check()


@pytest.mark.parametrize("columns", [2, 3, 4])
def test_fronts_of_more_rows_than_are_compared_at_once(columns: int) -> None:
    costs = torch.rand(600, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert nondominated_fronts(costs).tolist() == pymoo_fronts(costs)
    assert torch.equal(is_nondominated(costs), nondominated_fronts(costs) == 0)


def test_up_to_three_columns_no_row_is_compared_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("lockstep.search.pareto._dominates")
    for columns in (1, 2, 3):
        costs = torch.rand(600, columns, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert torch.equal(is_nondominated(costs), nondominated_fronts(costs) == 0)


def test_a_chain_has_a_front_for_each() -> None:
    for columns in (1, 2, 3, 4):
        costs = torch.arange(300.0).flip(0)[:, None].expand(-1, columns)
        assert nondominated_fronts(costs).tolist() == list(reversed(range(300)))


def test_of_no_designs_there_are_no_fronts() -> None:
    for columns in (1, 2, 3, 4):
        none = torch.empty(0, columns, dtype=torch.float64)
        assert len(nondominated_fronts(none)) == len(is_nondominated(none)) == 0


def test_of_no_designs_none_is_best() -> None:
    for columns in (1, 2, 3):
        costs = torch.empty(0, columns, dtype=torch.float64)
        assert len(best_first(costs)) == len(select_survivors(costs, 5)) == 0


def test_crowding_is_the_distance_of_the_neighbours_as_a_share_of_the_range() -> None:
    costs = torch.tensor([[0.0, 8.0], [1.0, 4.0], [3.0, 2.0], [4.0, 0.0]], dtype=torch.float64)
    room = crowding_distance(costs, torch.zeros(4, dtype=torch.int64))
    assert room.tolist() == [inf, 3 / 4 + 6 / 8, 3 / 4 + 4 / 8, inf]


def test_crowding_is_measured_within_a_front() -> None:
    front = torch.tensor([[0.0, 2.0], [1.0, 1.0], [2.0, 0.0]], dtype=torch.float64)
    room = crowding_distance(torch.cat([front, front + 5]), torch.tensor([0, 0, 0, 1, 1, 1]))
    assert room.tolist() == [inf, 2.0, inf] * 2


def test_failures_have_no_crowding_distance_and_cause_no_nan() -> None:
    costs = torch.tensor([[inf, inf], [1.0, 1.0], [inf, inf], [0.0, 3.0]], dtype=torch.float64)
    assert crowding_distance(costs, nondominated_fronts(costs)).tolist() == [0.0, inf, 0.0, inf]
    assert not crowding_distance(costs, torch.zeros(4, dtype=torch.int64)).isnan().any()
    assert select_survivors(costs[[0, 2]], 1).tolist() == [0]


def test_crowding_of_the_largest_numbers_is_a_number() -> None:
    large = torch.tensor([-1.7e308, 0.0, 1.7e308], dtype=torch.float64)
    assert crowding_distance(torch.stack([large, -large], 1), torch.zeros(3, dtype=torch.int64)).tolist() == [
        inf,
        2.0,
        inf,
    ]


@pytest.mark.parametrize("columns", [1, 2, 3])
def test_failures_come_last(columns: int) -> None:
    costs = torch.tensor([[inf], [2.0], [inf], [1.0], [3.0]], dtype=torch.float64).expand(-1, columns)
    assert best_first(costs).tolist() == select_survivors(costs, 5).tolist() == [3, 1, 4, 0, 2]
    assert select_survivors(costs, 3).tolist() == [3, 1, 4]


def test_a_lower_front_comes_first_and_in_a_front_the_least_crowded() -> None:
    front = torch.tensor([[0.0, 4.0], [0.5, 3.0], [1.0, 2.5], [4.0, 0.0]], dtype=torch.float64)
    costs = torch.cat([front + 5, front])
    assert best_first(costs).tolist() == [4, 7, 6, 5, 0, 3, 2, 1]


def test_of_equals_the_earlier_come_first() -> None:
    costs = torch.ones(5, 2, dtype=torch.float64)
    assert crowding_distance(costs, torch.zeros(5, dtype=torch.int64)).tolist() == [inf, 0, 0, 0, inf]
    assert best_first(costs).tolist() == [0, 4, 1, 2, 3]
    assert select_survivors(costs, 4).tolist() == [0, 4, 1, 2]


def test_a_front_that_does_not_fit_is_thinned_out_evenly() -> None:
    """If all were removed at once, everything in a crowded place would go; one by one, the rest get more room."""
    position = torch.rand(200, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    costs = torch.stack([position, 1 - position], 1)
    kept = position[select_survivors(costs, 50)].sort().values
    at_once = (
        position[crowding_distance(costs, torch.zeros(200, dtype=torch.int64)).argsort(descending=True)[:50]]
        .sort()
        .values
    )
    assert kept[0] == position.min() and kept[-1] == position.max()
    assert kept.diff().std() < 0.6 * at_once.diff().std()
