import pytest
import torch
from torch import Tensor, inf

from lockstep.errors import UserError
from lockstep.search.design_archive import (
    DesignArchive,
    ScoredDesign,
    best_design,
    generation_history,
    generations_without_improvement,
    pareto_front,
)
from lockstep.search.evaluators import ScalarEvaluator
from lockstep.search.genome import ChoiceGene, FloatGene, Gene, Genome, IntegerGene
from lockstep.search.problem import Objective, Problem

GENOME = Genome([FloatGene("a", 0.0, 1.0), IntegerGene("n", 0, 9)])


def rows(*values: tuple[float, float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def filled() -> DesignArchive:
    archive = DesignArchive(GENOME, 2)
    archive.add(rows((0.1, 1), (0.2, 2)), rows((5, 6), (inf, inf)), 0, {1: "it diverged"})
    archive.add(rows((0.3, 2.2)), rows((7, 8)), 1, {})
    return archive


def test_rows_stay_in_the_order_in_which_they_were_added() -> None:
    archive = filled()
    assert len(archive) == 3
    assert archive.designs.tolist() == [[0.1, 1], [0.2, 2], [0.3, 2]]
    assert archive.generations.tolist() == [0, 0, 1]
    assert archive.is_good.tolist() == [True, False, True]
    assert archive.failures == {1: "it diverged"}


def test_failures_are_keyed_by_their_row_in_the_archive() -> None:
    archive = filled()
    archive.add(rows((0.4, 1), (0.5, 1)), rows((1, 1), (inf, inf)), 2, {1: "out of time"})
    assert archive.failures == {1: "it diverged", 4: "out of time"}


def test_evaluated_designs_are_found() -> None:
    assert filled().find(rows((0.3, 1.8), (0.3, 1), (0.1, 1))) == [2, None, 0]


def test_no_design_is_stored_twice() -> None:
    with pytest.raises(AssertionError):
        filled().add(rows((0.1, 1)), rows((5, 6)), 2, {})
    with pytest.raises(AssertionError):
        filled().add(rows((0.7, 1), (0.7, 1)), rows((5, 6), (5, 6)), 2, {})


def test_a_restored_archive_finds_its_designs() -> None:
    archive = DesignArchive(GENOME, 2)
    archive.load_state_dict(filled().state_dict())
    assert archive.find(rows((0.2, 2), (0.3, 2))) == [1, 2]
    archive.add(rows((0.9, 9)), rows((1, 2)), 2, {})
    expected = filled()
    expected.add(rows((0.9, 9)), rows((1, 2)), 2, {})
    assert archive.state_dict().keys() == expected.state_dict().keys()
    for name, value in expected.state_dict().items():
        restored = archive.state_dict()[name]
        assert torch.equal(restored, value) if isinstance(value, Tensor) else restored == value


@pytest.mark.parametrize(
    ("genes", "objectives", "message"),
    [
        (
            GENOME.genes[:1],
            2,
            "saved search has 2 genes and 2 objectives, and this one has 1 and 2: choose another",
        ),
        (GENOME.genes, 1, "saved search has 2 genes and 2 objectives, and this one has 2 and 1"),
        (
            (FloatGene("a", 0.25, 1.0), IntegerGene("n", 2, 9)),
            2,
            "outside the current bounds of a, n: restore the old bounds",
        ),
    ],
)
def test_the_state_of_another_problem_is_refused(genes: tuple[Gene, ...], objectives: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        DesignArchive(Genome(genes), objectives).load_state_dict(filled().state_dict())


def test_bounds_may_become_wider() -> None:
    archive = DesignArchive(Genome([FloatGene("a", -1.0, 2.0), IntegerGene("n", 0, 99)]), 2)
    archive.load_state_dict(filled().state_dict())
    assert archive.find(rows((0.2, 2))) == [1]


RESULT_GENOME = Genome([FloatGene("x", 0.0, 1000.0), ChoiceGene("kind", ("plain", "fancy"))])


def problem(*objectives: Objective) -> Problem:
    return Problem(RESULT_GENOME, objectives, ScalarEvaluator(lambda design: design["x"]))


ONE = problem(Objective("error"))
TWO = problem(Objective("drag"), Objective("lift", "max"))


def archive(*generations: list[tuple[float, ...]]) -> DesignArchive:
    """Return an archive of these generations of costs; x counts the designs."""
    made = DesignArchive(RESULT_GENOME, len(generations[0][0]))
    for number, rows in enumerate(generations):
        costs = torch.tensor(rows, dtype=torch.float64)
        designs = torch.tensor([[len(made) + row, row % 2] for row in range(len(rows))], dtype=torch.float64)
        failures = {row: "ValueError" for row in range(len(rows)) if not bool(costs[row].isfinite().all())}
        made.add(designs, costs, number, failures)
    return made


def test_the_best_is_returned_with_its_design_by_name() -> None:
    assert best_design(ONE, archive([(3.0,), (1.0,)], [(2.0,)])) == ScoredDesign(
        design={"x": 1.0, "kind": "fancy"}, values={"error": 1.0}, row=1
    )


def test_of_equals_the_first_is_the_best() -> None:
    found = best_design(ONE, archive([(3.0,), (1.0,)], [(1.0,), (1.0,)]))
    assert found is not None
    assert found.row == 1


def test_if_all_failed_there_is_no_best_and_no_front() -> None:
    failed = archive([(inf,), (inf,)])
    assert best_design(ONE, failed) is None
    assert pareto_front(failed).tolist() == []
    assert best_design(ONE, DesignArchive(RESULT_GENOME, 1)) is None


def test_values_have_the_sign_they_were_given_with() -> None:
    found = best_design(problem(Objective("lift", "max")), archive([(-5.0,), (-7.0,), (inf,)]))
    assert found is not None
    assert found.values == {"lift": 7.0}


def test_the_front_has_the_designs_that_none_dominates() -> None:
    #                     on it       beaten by 0  on it       failed      equal to 2  on it
    several = archive([(2.0, 2.0), (2.0, 3.0), (1.0, 3.0)], [(inf, inf), (1.0, 3.0), (3.0, -1.0)])
    assert pareto_front(several).tolist() == [2, 4, 0, 5], "by the first objective, then in the archive's order"


def test_a_front_is_the_same_whatever_the_number_of_designs() -> None:
    # More than one block of comparisons: (i, 999 − i) are on it, and each has one behind it that is not.
    front = [(float(place), 999.0 - place) for place in range(0, 1000, 2)]
    behind = [(cost + 1, other + 1) for cost, other in front]
    assert pareto_front(archive(behind, front)).tolist() == list(range(500, 1000))
    with_a_third = archive([(*row, 0.0) for row in behind], [(*row, 0.0) for row in front])
    assert pareto_front(with_a_third).tolist() == list(range(500, 1000))


def test_of_many_sorted_designs_only_the_best_is_on_the_front() -> None:
    assert pareto_front(archive([(float(600 - place), float(600 - place)) for place in range(600)])).tolist() == [599]


def test_of_several_objectives_the_best_is_a_compromise_in_shares_of_the_fronts_range() -> None:
    # The middle one is nearest to the best of each, though drag is counted in thousands.
    found = best_design(TWO, archive([(0.0, -1.0), (400.0, -1.7), (1000.0, -2.0), (999.0, -0.5)]))
    assert found == ScoredDesign(design={"x": 1.0, "kind": "fancy"}, values={"drag": 400.0, "lift": 1.7}, row=1)


def test_of_the_largest_possible_values_the_best_is_a_compromise_too() -> None:
    found = best_design(TWO, archive([(1.5e308, -1.0), (-1.5e308, 1.0), (-1e308, -0.9)]))
    assert found is not None
    assert found.row == 2


def test_a_front_of_one_or_of_equals_has_a_best() -> None:
    for costs in ([(1.0, 1.0)], [(1.0, 1.0), (1.0, 1.0)], [(1.0, 1.0), (2.0, 1.0)]):
        found = best_design(TWO, archive(costs))
        assert found is not None
        assert found.row == 0


def test_history_has_the_best_so_far_and_the_median_of_the_new() -> None:
    lines = generation_history(ONE, archive([(5.0,), (4.0,), (9.0,), (inf,)], [(6.0,)], [(3.0,), (8.0,), (7.0,)]), 3)
    assert lines == [
        {"generation": 1, "best": {"error": 4.0}, "median": {"error": 5.0}, "evaluated": 4, "failed": 1},
        {"generation": 2, "best": {"error": 4.0}, "median": {"error": 6.0}, "evaluated": 1, "failed": 0},
        {"generation": 3, "best": {"error": 3.0}, "median": {"error": 7.0}, "evaluated": 3, "failed": 0},
    ]


def test_history_of_generations_that_failed_or_brought_nothing_new() -> None:
    made = archive([(inf, inf)], [(1.0, -2.0)])
    nothing = {"evaluated": 0, "failed": 0, "median": None}
    assert generation_history(TWO, made, 3) == [
        {"generation": 1, "best": None, "median": None, "evaluated": 1, "failed": 1},
        {
            "generation": 2,
            "best": {"drag": 1.0, "lift": 2.0},
            "median": {"drag": 1.0, "lift": 2.0},
            "evaluated": 1,
            "failed": 0,
        },
        {"generation": 3, "best": {"drag": 1.0, "lift": 2.0}, **nothing},
    ]


def test_updating_front_and_history_gives_the_same_as_computing_them_anew() -> None:
    costs = torch.randint(0, 40, (60, 2), generator=torch.Generator().manual_seed(3)).double()
    costs[::7] = inf
    rows = [tuple(row) for row in costs.tolist()]
    whole = archive(*(rows[start : start + 10] for start in range(0, 60, 10)))
    front, lines = pareto_front(archive(rows[:10])), generation_history(TWO, whole, 1)
    for generation in range(1, 6):
        some = archive(*(rows[start : start + 10] for start in range(0, 10 * (generation + 1), 10)))
        front = pareto_front(some, front, 10 * generation)
        lines = generation_history(TWO, some, generation + 1, lines)
        assert front.tolist() == pareto_front(some).tolist()
        assert best_design(TWO, some, front) == best_design(TWO, some)
    assert lines == generation_history(TWO, whole, 6)


def test_the_best_of_each_objective_may_be_of_different_designs() -> None:
    (line,) = generation_history(TWO, archive([(1.0, -1.0), (2.0, -5.0)]), 1)
    assert line["best"] == {"drag": 1.0, "lift": 5.0}


def test_generations_without_improvement_are_counted_since_the_last_one() -> None:
    made = archive([(5.0,)], [(4.0,)], [(4.5,)], [(4.0,)])
    assert [generations_without_improvement(made, count, 0.0) for count in range(5)] == [0, 0, 0, 1, 2]


def test_changes_below_min_delta_are_no_improvement_until_they_add_up() -> None:
    made = archive([(5.0,)], [(4.5,)], [(4.25,)], [(3.75,)])
    assert [generations_without_improvement(made, count, 1.0) for count in range(1, 5)] == [0, 1, 2, 0]
    assert generations_without_improvement(made, 2, 0.5) == 1, "as much as min_delta is not more"


def test_an_improvement_of_any_objective_counts() -> None:
    made = archive([(5.0, 5.0)], [(6.0, 4.0)], [(4.0, 9.0)], [(4.5, 4.5)])
    assert [generations_without_improvement(made, count, 0.0) for count in range(1, 5)] == [0, 0, 0, 1]


def test_failures_are_no_improvement_and_the_first_success_is_one() -> None:
    made = archive([(inf,)], [(inf,)], [(1e300,)])
    assert [generations_without_improvement(made, count, 0.0) for count in range(1, 4)] == [1, 2, 0]
