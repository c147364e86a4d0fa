import pytest
import torch
from torch import Tensor, inf

from lockstep.errors import UserError
from lockstep.search.evolution import Evolution, EvolutionSettings, crossover, mutate, stratified_sample, tournament
from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene
from lockstep.search.pareto import nondominated_fronts

FLOATS = Genome([FloatGene(f"x{number}", -1.0, 2.0) for number in range(5)])
MIXED = Genome(
    [
        FloatGene("span", 1.2, 1.8, group="plan"),
        IntegerGene("elements", 1, 4, group="plan"),
        ChoiceGene("section", ("naca", "gurney", "flat")),
    ]
)


def distance(designs: Tensor) -> Tensor:
    return designs.square().sum(1, keepdim=True)


def trade(designs: Tensor) -> Tensor:
    """Two costs against each other; in the mixed genome, and some fail."""
    span, elements, section = designs.unbind(1)
    costs = torch.stack([span + elements + (section == 1), 4 / elements - span], 1)
    return torch.where(((span * 100).floor() % 5 == 0)[:, None], inf, costs)


def evolution(
    genome: Genome = FLOATS, objectives: int = 1, *, seed: int = 3, size: int = 20, elites: int | None = None
) -> Evolution:
    return Evolution(genome, objectives, EvolutionSettings(population_size=size, elites=elites), seed)


def advance(strategy: Evolution, generations: range, count: int = 20) -> Evolution:
    for generation in generations:
        designs = strategy.ask(count, generation)
        strategy.tell(designs, trade(designs) if strategy.genome is MIXED else distance(designs))
    return strategy


def test_it_finds_a_minimum() -> None:
    strategy = evolution()
    first = strategy.ask(20, 0)
    assert strategy.population.shape == (0, 5) and strategy.costs.shape == (0, 1)
    strategy.tell(first, distance(first))
    advance(strategy, range(1, 60))
    assert strategy.costs[0].item() < 1e-3 * distance(first).min().item()
    assert torch.equal(strategy.costs, strategy.costs.sort(0).values)
    torch.testing.assert_close(strategy.costs, distance(strategy.population))


def test_it_finds_a_front_in_a_mixed_genome() -> None:
    strategy = advance(evolution(MIXED, 2), range(40))
    assert strategy.costs.isfinite().all()
    assert set(strategy.population[:, 1].tolist()) == {1.0, 2.0, 3.0, 4.0}
    assert (strategy.population[:, 2] != 1).all()  # the section that only costs
    assert (nondominated_fronts(strategy.costs) == 0).all()
    assert torch.equal(MIXED.repair(strategy.population), strategy.population)


def test_the_first_generation_is_sampled_everywhere() -> None:
    first = Evolution(FLOATS, 1, EvolutionSettings(), 3).ask(30, 0)[:, 0].sort().values
    assert first[0] < -0.8 and first[-1] > 1.8 and first.diff().max() < 0.4


def test_ask_depends_on_seed_generation_and_the_told_costs() -> None:
    strategy = advance(evolution(), range(3))
    assert torch.equal(strategy.ask(20, 3), advance(evolution(), range(3)).ask(20, 3))
    assert torch.equal(strategy.ask(20, 3), strategy.ask(20, 3))
    assert not torch.equal(strategy.ask(20, 3), strategy.ask(20, 4))
    assert not torch.equal(evolution(seed=3).ask(20, 0), evolution(seed=4).ask(20, 0))


@pytest.mark.parametrize(("genome", "objectives"), [(FLOATS, 1), (MIXED, 2)])
def test_restored_at_any_generation_it_continues_with_the_same_bits(genome: Genome, objectives: int) -> None:
    expected = advance(evolution(genome, objectives), range(6))
    for pause in range(6):
        before = advance(evolution(genome, objectives), range(pause))
        before.ask(20, pause)  # and is stopped while they are evaluated
        after = evolution(genome, objectives)
        after.load_state_dict(before.state_dict())
        advance(after, range(pause, 6))
        assert torch.equal(after.population, expected.population)
        assert torch.equal(after.costs, expected.costs)


def test_candidates_by_the_thousand_are_all_different_and_new() -> None:
    strategy = advance(evolution(), range(5))
    candidates = strategy.ask(2000, 5)
    keys = set(FLOATS.keys(candidates))
    assert len(keys) == 2000
    assert not keys & set(FLOATS.keys(strategy.population))


def test_if_designs_run_out_they_are_repeated() -> None:
    genome = Genome([IntegerGene("n", 0, 2), ChoiceGene("c", ("a", "b"))])
    strategy = evolution(genome)
    strategy.tell(genome.sample(3, torch.Generator()), torch.zeros(3, 1, dtype=torch.float64))
    assert strategy.ask(50, 1).shape == (50, 2)


def test_designs_from_elsewhere_are_accepted_and_duplicates_dropped() -> None:
    strategy = advance(evolution(), range(2))
    best = torch.zeros(1, 5, dtype=torch.float64)
    designs = torch.cat([best, best, strategy.population[:3]])
    strategy.tell(designs, distance(designs))
    assert torch.equal(strategy.population[:1], best)
    assert len(set(FLOATS.keys(strategy.population))) == len(strategy.population) == 20


def test_designs_from_elsewhere_are_sorted() -> None:
    strategy = evolution(MIXED, 1)
    strategy.tell(torch.tensor([[9.0, 2.4, -3.0]], dtype=torch.float64), torch.zeros(1, 1, dtype=torch.float64))
    assert strategy.population.tolist() == [[1.8, 2.0, 0.0]]


def test_any_number_of_designs_may_be_told() -> None:
    strategy = evolution()
    for count, expected in ((5, 5), (0, 5), (100, 20), (1, 20)):
        designs = strategy.ask(count, count)
        strategy.tell(designs, distance(designs))
        assert len(strategy.population) == expected


def test_if_all_failed_it_samples_again() -> None:
    strategy = evolution(size=10)
    for generation in range(2):
        designs = strategy.ask(10, generation)
        strategy.tell(designs, torch.full((10, 1), inf, dtype=torch.float64))
        assert len(strategy.population) == 10
    designs = strategy.ask(10, 2)
    assert (designs[:, 0].max() - designs[:, 0].min()) > 2
    strategy.tell(designs[:1], distance(designs[:1]))
    assert torch.equal(strategy.population[:1], designs[:1])


def test_children_of_a_single_parent_are_not_all_close_to_it() -> None:
    strategy = evolution()
    parent = FLOATS.row(dict.fromkeys(FLOATS.names, 0.5))
    strategy.tell(parent[None], distance(parent[None]))
    steps = (strategy.ask(2000, 1) - parent).abs().amax(1)
    assert steps.min() > 0 and (steps > 1e-3).double().mean() > 0.95


def test_children_have_genes_of_two_parents() -> None:
    strategy = evolution()
    parents = torch.tensor([[0.0] * 5, [1.0] * 5], dtype=torch.float64)
    strategy.tell(parents, distance(parents))
    children = strategy.ask(200, 1)
    has_both = (children == 0).any(1) & (children == 1).any(1)
    assert 0.1 < has_both.double().mean() < 0.4  # of two, a tournament often has the better win twice


@pytest.mark.parametrize("bad", [inf, -inf, float("nan")])
def test_a_design_with_any_nonfinite_cost_has_failed(bad: float) -> None:
    strategy = evolution(objectives=2)
    designs = strategy.ask(3, 0)
    strategy.tell(designs, torch.tensor([[0.0, bad], [5.0, 5.0], [bad, 0.0]], dtype=torch.float64))
    assert strategy.costs.tolist() == [[5.0, 5.0], [inf, inf], [inf, inf]]


@pytest.mark.parametrize(("elites", "staying"), [(None, 4), (4, 4), (1, 1), (0, 0)])
def test_only_elites_survive_if_there_are_enough_others(elites: int | None, staying: int) -> None:
    strategy = evolution(size=4, elites=elites)
    good, worse = (torch.full((4, 5), value).double() + torch.arange(4)[:, None] / 100 for value in (0.0, 1.0))
    strategy.tell(good, distance(good))
    strategy.tell(worse, distance(worse))
    assert int((strategy.population[:, 0] < 0.5).sum()) == staying
    strategy.tell(worse[:0], distance(worse[:0]))
    assert len(strategy.population) == 4


def test_parents_survive_in_place_of_failed_children() -> None:
    strategy = evolution(size=4, elites=1)
    parents, children = FLOATS.sample(8, torch.Generator().manual_seed(1)).split(4)
    strategy.tell(parents, distance(parents))
    costs = distance(children)
    costs[1:] = inf
    strategy.tell(children, costs)
    assert strategy.costs.isfinite().all()


def test_a_failed_design_is_no_parent() -> None:
    strategy = evolution(size=4)
    designs = torch.tensor([[0.5], [0.6], [1.9], [1.9]], dtype=torch.float64) + torch.arange(5) / 1000
    strategy.tell(designs, torch.tensor([[1.0], [2.0], [inf], [inf]], dtype=torch.float64))
    children = strategy.ask(500, 1)
    assert ((children - designs[0]).abs() < 0.3).all(1).any(), "some are close to a parent"
    assert not ((children - designs[2]).abs() < 0.3).all(1).any(), "none is close to a failed design"


def test_steps_are_narrow_where_the_population_agrees() -> None:
    strategy = evolution(size=50)
    designs = torch.linspace(0.0, 1.0, 50, dtype=torch.float64)[:, None].repeat(1, 5)
    designs[:, 0] = 0.5 + 1e-4 * designs[:, 0]
    strategy.tell(designs, distance(designs))
    steps = (strategy.ask(4000, 1)[:, 0] - 0.50005).abs()
    steps = steps[steps > 0.6e-4]  # not what is a parent's, and so less than half of the narrow steps
    assert 0.15 < (steps < 1e-3).double().mean() < 0.5


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("population_size", 0, "population_size=0: expected a whole number greater than 0"),
        ("tournament_size", 1.5, "tournament_size=1.5: expected a whole number greater than 0"),
        ("elites", -1, "elites=-1: expected a whole number of at least 0, or None for all"),
        ("crossover_rate", 1.5, "crossover_rate=1.5: expected a number from 0 to 1"),
        ("mutation_rate", -0.1, "mutation_rate=-0.1: expected a number from 0 to 1"),
        ("mutation_strength", 0, "mutation_strength=0: expected a number greater than 0"),
        ("strength_floor", 0.3, "strength_floor=0.3: expected more than 0 and no more than mutation_strength=0.1"),
    ],
)
def test_an_invalid_setting_is_named(setting: str, value: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        EvolutionSettings(**{setting: value})


MIXED_GENOME = Genome(
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
COLUMN = {name: column for column, name in enumerate(MIXED_GENOME.names)}


def stream(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def mutated(
    designs: Tensor, *, rate: float = 1.0, wide: float = 0.1, narrow: float = 0.1, must: bool = False
) -> Tensor:
    steps = torch.full((len(MIXED_GENOME),), narrow, dtype=torch.float64)
    return mutate(MIXED_GENOME, designs, torch.full((len(designs),), must), rate, wide, steps, stream())


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
    first, second = MIXED_GENOME.sample(200, stream(2)), MIXED_GENOME.sample(200, stream(3))
    child = crossover(MIXED_GENOME, first, second, 0.0, stream())
    for group in range(MIXED_GENOME.num_linkage_groups):
        genes = MIXED_GENOME.linkage_group_of_gene == group
        is_first = (child[:, genes] == first[:, genes]).all(1)
        is_second = (child[:, genes] == second[:, genes]).all(1)
        assert (is_first | is_second).all()
        if len(MIXED_GENOME.genes[int(genes.nonzero()[0])].group):
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
    first, second = MIXED_GENOME.sample(300, stream(2)), MIXED_GENOME.sample(300, stream(3))
    first[:, COLUMN["section"]], second[:, COLUMN["section"]] = 0, 2
    child = crossover(MIXED_GENOME, first, second, 1.0, stream())
    section, camber = child[:, COLUMN["section"]], child[:, COLUMN["camber"]]
    assert set(section.tolist()) == {0, 2}
    to_first, to_second = ((camber - parent[:, COLUMN["camber"]]).abs() for parent in (first, second))
    agrees = (section == 0) == (to_first < to_second)
    assert agrees.double().mean() > 0.95  # not where it was clamped


def test_parents_that_are_equal_have_an_equal_child() -> None:
    parents = MIXED_GENOME.sample(50, stream(2))
    assert torch.equal(crossover(MIXED_GENOME, parents, parents, 1.0, stream()), parents)


def test_mutants_are_in_order_and_every_gene_that_can_has_changed() -> None:
    designs = MIXED_GENOME.sample(400, stream(2))
    new = mutated(designs)
    assert torch.equal(MIXED_GENOME.repair(new), new)
    can_change = (MIXED_GENOME.high > MIXED_GENOME.low).expand_as(new)
    assert torch.equal(new != designs, can_change)


@pytest.mark.parametrize("at", ["low", "high"])
def test_from_its_bound_every_gene_moves_inwards(at: str) -> None:
    designs = getattr(MIXED_GENOME, at).expand(100, -1)
    assert torch.equal(mutated(designs) != designs, (MIXED_GENOME.high > MIXED_GENOME.low).expand_as(designs))


def test_whole_numbers_move_however_small_the_step() -> None:
    designs = MIXED_GENOME.sample(200, stream(2))
    moved = (mutated(designs, wide=1e-9, narrow=1e-9) - designs)[:, COLUMN["elements"]]
    assert set(moved.tolist()) == {-1.0, 1.0}


def test_a_choice_becomes_each_of_the_others() -> None:
    designs = MIXED_GENOME.sample(1, stream(2)).expand(300, -1).clone()
    designs[:, COLUMN["section"]] = 1
    new = mutated(designs)[:, COLUMN["section"]]
    assert set(new.tolist()) == {0.0, 2.0}
    assert 100 < int((new == 0).sum()) < 200


def test_half_of_the_steps_are_wide_and_half_narrow() -> None:
    designs = MIXED_GENOME.sample(1, stream(2)).expand(2000, -1).clone()
    designs[:, COLUMN["gap"]] = 1.0
    steps = (mutated(designs, wide=0.1, narrow=1e-4) - designs)[:, COLUMN["gap"]].abs()
    wide = steps > 1e-3
    assert 900 < int(wide.sum()) < 1100
    assert steps[wide].square().mean().sqrt().item() == pytest.approx(0.1 * 2, rel=0.1)
    assert steps[~wide].square().mean().sqrt().item() == pytest.approx(1e-4 * 2, rel=0.2)


def test_genes_mutate_at_the_rate_and_one_at_least_where_a_design_must() -> None:
    designs = MIXED_GENOME.sample(2000, stream(2))
    changed = (mutated(designs, rate=0.2) != designs).double()
    assert changed.mean(0)[COLUMN["gap"]].item() == pytest.approx(0.2, abs=0.03)
    assert torch.equal(mutated(designs, rate=0.0), designs)
    only = mutated(designs, rate=0.0, must=True) != designs
    assert (only.sum(1) == 1).all()
    assert (only.sum(0) > 200).equal(MIXED_GENOME.high > MIXED_GENOME.low)


def test_where_nothing_can_change_nothing_does() -> None:
    genome = Genome([FloatGene("a", 2.0, 2.0), ChoiceGene("c", ("only",))])
    designs = genome.sample(3, stream())
    must = torch.ones(3, dtype=torch.bool)
    assert torch.equal(mutate(genome, designs, must, 1.0, 0.1, torch.ones(2).double(), stream()), designs)
