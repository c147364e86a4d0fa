import pytest
import torch
from torch import Tensor, inf

from lockstep.errors import UserError
from lockstep.search.archive import Archive
from lockstep.search.genome import FloatGene, Gene, Genome, IntegerGene

GENOME = Genome([FloatGene("a", 0.0, 1.0), IntegerGene("n", 0, 9)])


def rows(*values: tuple[float, float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def filled() -> Archive:
    archive = Archive(GENOME, 2)
    archive.add(rows((0.1, 1), (0.2, 2)), rows((5, 6), (inf, inf)), 0, {1: "it diverged"})
    archive.add(rows((0.3, 2.2)), rows((7, 8)), 1, {})
    return archive


def test_rows_stand_in_the_order_in_which_they_came() -> None:
    archive = filled()
    assert len(archive) == 3
    assert archive.designs.tolist() == [[0.1, 1], [0.2, 2], [0.3, 2]]
    assert archive.generations.tolist() == [0, 0, 1]
    assert archive.is_good.tolist() == [True, False, True]
    assert archive.failures == {1: "it diverged"}


def test_failures_are_known_by_their_row_in_the_whole() -> None:
    archive = filled()
    archive.add(rows((0.4, 1), (0.5, 1)), rows((1, 1), (inf, inf)), 2, {1: "out of time"})
    assert archive.failures == {1: "it diverged", 4: "out of time"}


def test_what_was_evaluated_is_found_again() -> None:
    assert filled().find(rows((0.3, 1.8), (0.3, 1), (0.1, 1))) == [2, None, 0]


def test_nothing_is_there_twice() -> None:
    with pytest.raises(AssertionError):
        filled().add(rows((0.1, 1)), rows((5, 6)), 2, {})
    with pytest.raises(AssertionError):
        filled().add(rows((0.7, 1), (0.7, 1)), rows((5, 6), (5, 6)), 2, {})


def test_it_is_restored_with_what_it_can_find() -> None:
    archive = Archive(GENOME, 2)
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
        (GENOME.genes[:1], 2, "saved has 2 genes and 2 objectives, and this one has 1 and 2: another problem needs"),
        (GENOME.genes, 1, "saved has 2 genes and 2 objectives, and this one has 2 and 1"),
        (
            (FloatGene("a", 0.25, 1.0), IntegerGene("n", 2, 9)),
            2,
            "outside of what a, n can be now: give the old bounds",
        ),
    ],
)
def test_what_another_problem_has_saved_is_refused(genes: tuple[Gene, ...], objectives: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Archive(Genome(genes), objectives).load_state_dict(filled().state_dict())


def test_bounds_may_become_wider() -> None:
    archive = Archive(Genome([FloatGene("a", -1.0, 2.0), IntegerGene("n", 0, 99)]), 2)
    archive.load_state_dict(filled().state_dict())
    assert archive.find(rows((0.2, 2))) == [1]
