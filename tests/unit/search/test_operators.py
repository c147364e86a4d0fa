import pytest
import torch
from torch import Tensor

from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene
from lockstep.search.operators import crossover, mutate, stratified_sample, tournament

MIXED = Genome(
    [
        FloatGene("span", 1.2, 1.8, group="plan"),
        FloatGene("chord", 0.1, 0.5, group="plan"),
        IntegerGene("elements", 1, 4, group="plan"),
        ChoiceGene("section", ("naca", "gurney", "flat"), group="profile"),
        FloatGene("camber", 0.0, 0.1, group="profile"),
        FloatGene("fixed", 3.0, 3.0),
        FloatGene("gap", 0.0, 2.0),
    ]
)
COLUMN = {name: column for column, name in enumerate(MIXED.names)}


def stream(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mutated(
    designs: Tensor, *, rate: float = 1.0, wide: float = 0.1, narrow: float = 0.1, must: bool = False
) -> Tensor:
    steps = torch.full((len(MIXED),), narrow, dtype=torch.float64)
    return mutate(MIXED, designs, torch.full((len(designs),), must), rate, wide, steps, stream())


def test_a_sample_has_one_design_in_each_slice_of_every_gene() -> None:
    genome = Genome([FloatGene("a", 0.0, 10.0), FloatGene("b", -5.0, 5.0), IntegerGene("n", 1, 5)])
    sample = stratified_sample(genome, 10, stream())
    assert sample[:, 0].floor().sort().values.tolist() == list(range(10))
    assert (sample[:, 1] + 5).floor().sort().values.tolist() == list(range(10))
    assert sample[:, 2].sort().values.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert sample[:, 0].argsort().tolist() != sample[:, 1].argsort().tolist()
    assert stratified_sample(genome, 0, stream()).shape == (0, 3)


def test_a_larger_tournament_favours_the_best() -> None:
    means = [tournament(100, 4000, size, stream()).double().mean().item() for size in (1, 2, 4)]
    assert means == pytest.approx([49.5, 33, 19.5], abs=2)  # (100 / (size + 1)) of rows from 0 to 99
    assert set(tournament(3, 200, 2, stream()).tolist()) == {0, 1, 2}


def test_without_blends_a_group_is_one_parent_s_as_a_whole() -> None:
    first, second = MIXED.sample(200, stream(2)), MIXED.sample(200, stream(3))
    child = crossover(MIXED, first, second, 0.0, stream())
    for group in range(MIXED.num_travellers):
        genes = MIXED.traveller_of_gene == group
        is_first = (child[:, genes] == first[:, genes]).all(1)
        is_second = (child[:, genes] == second[:, genes]).all(1)
        assert (is_first | is_second).all()
        if len(MIXED.genes[int(genes.nonzero()[0])].group):
            assert is_first.sum() > 50 and is_second.sum() > 50


def test_genes_without_a_group_travel_alone() -> None:
    genome = Genome([FloatGene("a", 0.0, 1.0), FloatGene("b", 0.0, 1.0)])
    child = crossover(genome, torch.zeros(99, 2).double(), torch.ones(99, 2).double(), 0.0, stream())
    assert {tuple(row) for row in child.tolist()} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_blends_are_near_a_parent_and_a_group_s_genes_equally_far() -> None:
    genome = Genome([FloatGene("a", -9.0, 9.0, group="g"), FloatGene("b", -9.0, 9.0, group="g")])
    first, second = torch.tensor([[0.0, 0.0]]).double(), torch.tensor([[1.0, -2.0]]).double()
    child = crossover(genome, first.expand(2000, -1), second.expand(2000, -1), 1.0, stream())
    share = child[:, 0]
    torch.testing.assert_close(child[:, 1], -2 * share)
    assert (share < 0).any() and (share > 1).any() and ((share > 0) & (share < 1)).any()
    distance = torch.minimum(share.abs(), (share - 1).abs())
    assert distance.median() < 0.1
    assert share.mean().item() == pytest.approx(0.5, abs=0.05)


def test_a_blend_s_choice_is_a_parent_s_and_goes_with_its_group() -> None:
    first, second = MIXED.sample(300, stream(2)), MIXED.sample(300, stream(3))
    first[:, COLUMN["section"]], second[:, COLUMN["section"]] = 0, 2
    child = crossover(MIXED, first, second, 1.0, stream())
    section, camber = child[:, COLUMN["section"]], child[:, COLUMN["camber"]]
    assert set(section.tolist()) == {0, 2}
    to_first, to_second = ((camber - parent[:, COLUMN["camber"]]).abs() for parent in (first, second))
    agrees = (section == 0) == (to_first < to_second)
    assert agrees.double().mean() > 0.95  # not where it was clamped


def test_parents_that_are_equal_have_an_equal_child() -> None:
    parents = MIXED.sample(50, stream(2))
    assert torch.equal(crossover(MIXED, parents, parents, 1.0, stream()), parents)


def test_mutants_are_in_order_and_every_gene_that_can_has_changed() -> None:
    designs = MIXED.sample(400, stream(2))
    new = mutated(designs)
    assert torch.equal(MIXED.repair(new), new)
    can_change = (MIXED.high > MIXED.low).expand_as(new)
    assert torch.equal(new != designs, can_change)


@pytest.mark.parametrize("at", ["low", "high"])
def test_from_its_bound_every_gene_moves_inwards(at: str) -> None:
    designs = getattr(MIXED, at).expand(100, -1)
    assert torch.equal(mutated(designs) != designs, (MIXED.high > MIXED.low).expand_as(designs))


def test_whole_numbers_move_however_small_the_step() -> None:
    designs = MIXED.sample(200, stream(2))
    moved = (mutated(designs, wide=1e-9, narrow=1e-9) - designs)[:, COLUMN["elements"]]
    assert set(moved.tolist()) == {-1.0, 1.0}


def test_a_choice_becomes_each_of_the_others() -> None:
    designs = MIXED.sample(1, stream(2)).expand(300, -1).clone()
    designs[:, COLUMN["section"]] = 1
    new = mutated(designs)[:, COLUMN["section"]]
    assert set(new.tolist()) == {0.0, 2.0}
    assert 100 < int((new == 0).sum()) < 200


def test_half_of_the_steps_are_wide_and_half_narrow() -> None:
    designs = MIXED.sample(1, stream(2)).expand(2000, -1).clone()
    designs[:, COLUMN["gap"]] = 1.0
    steps = (mutated(designs, wide=0.1, narrow=1e-4) - designs)[:, COLUMN["gap"]].abs()
    wide = steps > 1e-3
    assert 900 < int(wide.sum()) < 1100
    assert steps[wide].square().mean().sqrt().item() == pytest.approx(0.1 * 2, rel=0.1)
    assert steps[~wide].square().mean().sqrt().item() == pytest.approx(1e-4 * 2, rel=0.2)


def test_genes_mutate_at_the_rate_and_one_at_least_where_a_design_must() -> None:
    designs = MIXED.sample(2000, stream(2))
    changed = (mutated(designs, rate=0.2) != designs).double()
    assert changed.mean(0)[COLUMN["gap"]].item() == pytest.approx(0.2, abs=0.03)
    assert torch.equal(mutated(designs, rate=0.0), designs)
    only = mutated(designs, rate=0.0, must=True) != designs
    assert (only.sum(1) == 1).all()
    assert (only.sum(0) > 200).equal(MIXED.high > MIXED.low)


def test_where_nothing_can_change_nothing_does() -> None:
    genome = Genome([FloatGene("a", 2.0, 2.0), ChoiceGene("c", ("only",))])
    designs = genome.sample(3, stream())
    must = torch.ones(3, dtype=torch.bool)
    assert torch.equal(mutate(genome, designs, must, 1.0, 0.1, torch.ones(2).double(), stream()), designs)
