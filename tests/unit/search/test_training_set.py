"""The training set of the surrogate network."""

import pytest
import torch

from lockstep.search import training_set as module
from lockstep.search.design_archive import DesignArchive
from lockstep.search.genome import ChoiceGene, FloatGene, Genome
from lockstep.search.surrogate_network import SurrogateNetwork
from lockstep.search.training_set import (
    DesignMemory,
    FeatureScaling,
    TrainingSet,
    draw_training_set,
    normal_ranks,
    training_loss,
)
from lockstep.world.keyed_random import keyed_generator
from tests.unit.search.guided import GENOME, costs_of, filled


def drawn(archive: DesignArchive, count: int = 200) -> tuple[FeatureScaling, DesignMemory, TrainingSet]:
    memory = DesignMemory.of(archive, 50)
    scaling = FeatureScaling.around(GENOME, memory.designs[: memory.num_good])
    return scaling, memory, draw_training_set(scaling, memory, count, keyed_generator(1, "samples"))


def network() -> SurrogateNetwork:
    return SurrogateNetwork(3, 3, 1, members=2, width=8, depth=1, generator=keyed_generator(0, "weights"))


def test_ranks_become_normal_deviates_and_ties_share_theirs() -> None:
    costs = torch.tensor([[5.0, 1.0], [1e9, 1.0], [-3.0, 1.0], [5.0, 1.0]], dtype=torch.float64)
    first, second = normal_ranks(costs).unbind(1)
    assert first[0] == first[3] == 0.0 and first[1] > 0 > first[2]
    torch.testing.assert_close(first[1], -first[2])
    assert second.tolist() == [0.0] * 4
    many = normal_ranks(torch.arange(1000, dtype=torch.float64)[:, None])
    torch.testing.assert_close(many.std(), torch.tensor(1.0, dtype=torch.float64), atol=0.01, rtol=0.0)


def test_the_best_are_remembered_best_first_and_then_failures() -> None:
    archive = filled(100, failed=[3, 70])
    memory = DesignMemory.of(archive, 20)
    costs = costs_of(memory.designs)[:20, 0]
    assert memory.num_good == 20 and torch.equal(costs, archive.costs[:, 0].sort().values[:20])
    assert torch.equal(memory.designs[20:], archive.designs[[3, 70]])


def test_designs_are_compared_in_bounded_numbers_with_the_same_lessons(monkeypatch: pytest.MonkeyPatch) -> None:
    *_, at_once = drawn(filled(100))
    distances, counts = module._squared_distances, []

    def counted(*tables: torch.Tensor) -> torch.Tensor:
        counts.append(tables[-1].numel() * len(GENOME))
        return distances(*tables)

    monkeypatch.setattr(module, "_squared_distances", counted)
    monkeypatch.setattr(module, "_MAX_DIFFERENCES", 500)
    *_, in_parts = drawn(filled(100))
    assert all(map(torch.equal, at_once, in_parts))
    assert sum(counts) == 200 * module._NUM_PARTNERS * len(GENOME) and max(counts) <= 500


def test_a_lesson_leads_to_a_better_design_near_by() -> None:
    scaling, memory, samples = drawn(filled(100))
    better = (samples.features[:, :3] + samples.moves).double()
    ends = scaling.designs(better, samples.options.argmax(1, keepdim=True).double())
    starts = scaling.designs(samples.features[:, :3].double(), samples.features[:, 3:].argmax(1, keepdim=True).double())
    has_better = samples.gains > 0
    assert has_better.any() and (costs_of(ends) < costs_of(starts))[has_better].all()
    typical = (
        (scaling.numeric_features(memory.designs)[:, None] - scaling.numeric_features(memory.designs))
        .norm(dim=2)
        .median()
    )
    assert samples.moves[has_better].norm(dim=1).median() < 0.8 * typical


def test_from_the_best_no_move_counts() -> None:
    scaling, memory, samples = drawn(filled(100), count=2000)
    is_best = (samples.features == scaling.features(memory.designs[:1])).all(1)
    assert is_best.any() and (samples.gains[is_best] == 0).all() and (samples.gains[~is_best] > 0).any()


def test_a_longer_way_up_counts_more() -> None:
    _, memory, samples = drawn(filled(100), count=2000)
    places = samples.costs[:, 0]
    found = samples.gains > 0
    assert samples.gains[found & (places > 1)].mean() > samples.gains[found & (places < -1)].mean()
    assert memory.num_good == 50


def test_there_are_as_many_lessons_as_asked_for_however_few_designs() -> None:
    _, _, samples = drawn(filled(8), count=500)
    assert {len(part) for part in samples} == {500}


def test_failures_teach_no_cost_but_that_they_fail() -> None:
    _, _, samples = drawn(filled(100, failed=range(40)))
    assert 0 < samples.failed.mean() < 1
    other = samples._replace(costs=samples.costs + 7.0 * samples.failed[:, None])
    losses = [training_loss(network(), each, [3], 1.0, 1.0) for each in (samples, other)]
    assert torch.equal(losses[0]["value"][0], losses[1]["value"][0])
    mistaken = training_loss(network(), samples._replace(failed=1.0 - samples.failed), [3], 1.0, 1.0)
    assert mistaken["failure"][0] != losses[0]["failure"][0]


def test_weights_are_the_losses() -> None:
    _, _, samples = drawn(filled(100))
    plain = training_loss(network(), samples, [3], 1.0, 1.0)
    weighted = training_loss(network(), samples, [3], 2.0, 0.5)
    for name, factor in {"value": 2.0, "failure": 2.0, "policy": 0.5}.items():
        torch.testing.assert_close(weighted[name][0], factor * plain[name][0])


def test_the_policys_loss_is_the_moves_likelihood() -> None:
    made = network()
    samples = drawn(filled(100), count=1)[2]._replace(gains=torch.tensor([2.0]))
    output = made(samples.features)
    moves = torch.distributions.Normal(output.moves, output.log_stds.exp()).log_prob(samples.moves)
    options = torch.distributions.Categorical(logits=output.options).log_prob(samples.options.argmax(1))
    constant = 3 * 0.5 * torch.log(torch.tensor(2 * torch.pi))
    expected = -2.0 * (moves.sum(2) + constant + options).sum() / 6
    torch.testing.assert_close(training_loss(made, samples, [3], 1.0, 1.0)["policy"][0], expected)


DESIGNS = GENOME.sample(200, keyed_generator(3, "designs"))


def test_numbers_are_seen_from_the_middle_and_in_deviations() -> None:
    numbers = FeatureScaling.around(GENOME, DESIGNS).numeric_features(DESIGNS)
    torch.testing.assert_close(numbers.mean(0), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(numbers.std(0, correction=0), torch.ones(3, dtype=torch.float64))


def test_a_choice_is_a_column_an_option() -> None:
    scaling = FeatureScaling.around(GENOME, DESIGNS)
    rows = torch.tensor([[0.0, 2.0, 45.0, 3.0], [0.0, 0.0, 45.0, 3.0]], dtype=torch.float64)
    assert scaling.features(rows)[:, 3:].tolist() == [[0, 0, 1], [1, 0, 0]]


def test_designs_come_back() -> None:
    scaling = FeatureScaling.around(GENOME, DESIGNS)
    back = scaling.designs(scaling.numeric_features(DESIGNS), DESIGNS[:, [1]])
    torch.testing.assert_close(back, DESIGNS)


def test_what_is_beyond_a_bound_is_repaired() -> None:
    scaling = FeatureScaling.around(GENOME, DESIGNS)
    far = scaling.designs(torch.full((1, 3), 99.0, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    assert far.tolist() == [[6.0, 1.0, 90.0, 9.0]]


def test_where_all_are_alike_a_whole_number_still_moves() -> None:
    alike = DESIGNS[:1].expand(9, -1)
    scaling = FeatureScaling.around(GENOME, alike)
    moved = scaling.designs(scaling.numeric_features(alike[:1]) - 2.0, alike[:1, [1]])
    assert float(moved[0, 3]) == float(alike[0, 3]) - 1
    torch.testing.assert_close(moved[0, 0], alike[0, 0], atol=1e-4, rtol=0.0)


def test_what_lies_far_out_is_seen_at_the_edge() -> None:
    scaling = FeatureScaling.around(GENOME, DESIGNS[:1].expand(9, -1))
    assert scaling.features(DESIGNS)[:, :3].abs().max() == 8.0


def test_a_genome_of_choices_alone() -> None:
    genome = Genome([ChoiceGene("a", (1, 2)), ChoiceGene("b", (1, 2, 3))])
    designs = torch.tensor([[1.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    scaling = FeatureScaling.around(genome, designs)
    assert scaling.features(designs).tolist() == [[0, 1, 0, 0, 1], [1, 0, 1, 0, 0]]
    assert torch.equal(scaling.designs(scaling.numeric_features(designs), designs), designs)


def test_a_gene_that_is_fixed_stays() -> None:
    genome = Genome([FloatGene("a", 2.0, 2.0), FloatGene("b", 0.0, 1.0)])
    designs = genome.sample(5, keyed_generator(0, "designs"))
    scaling = FeatureScaling.around(genome, designs)
    assert scaling.features(designs).isfinite().all()
    assert (scaling.designs(scaling.numeric_features(designs) + 1, designs[:, :0])[:, 0] == 2.0).all()


def test_the_state_makes_it_again() -> None:
    scaling = FeatureScaling.around(GENOME, DESIGNS)
    again = FeatureScaling.from_state(GENOME, scaling.state_dict())
    assert torch.equal(again.features(DESIGNS), scaling.features(DESIGNS))
