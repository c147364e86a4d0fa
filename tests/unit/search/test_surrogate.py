"""The surrogate: what is chosen, what is learned, and that both can be repeated to the last bit."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.engine.state_digest import named_tensors
from lockstep.search.design_archive import DesignArchive
from lockstep.search.genome import ChoiceGene, Genome
from lockstep.search.pareto import best_first
from lockstep.search.surrogate import Surrogate, propose
from lockstep.search.surrogate_network import CurriculumStage, NetworkSettings, SurrogateNetwork
from lockstep.search.training_set import FeatureScaling
from lockstep.world.keyed_random import keyed_generator
from lockstep.world.world import World
from tests.unit.search.guided import GENOME, costs_of, filled

COUNT = 20


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, as each rank does: more would slow such a small network down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_surrogate(seed: int = 7, **settings: Any) -> Surrogate:
    small = {"steps": 8, "global_batch": 32, "lanes": 2, "members": 2, "width": 16, "lr": 0.02}
    return Surrogate(GENOME, 1, NetworkSettings(**(small | settings)), World(), seed)


def choose(surrogate: Surrogate, archive: DesignArchive, generation: int = 1, count: int = COUNT) -> Tensor:
    candidates = GENOME.sample(surrogate.num_candidates(count, generation), keyed_generator(generation, "candidates"))
    rows = best_first(archive.costs)[:10]
    return surrogate.choose(candidates, archive, archive.designs[rows], archive.costs[rows], count, generation)


def bits(surrogate: Surrogate) -> dict[str, Tensor]:
    return dict(named_tensors(surrogate.state_dict(), "guide"))


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_switched_off_it_changes_nothing() -> None:
    off, archive = make_surrogate(guided_share=0.0), filled(40)
    before = bits(off)
    assert off.train(archive, 0) == {} and are_equal(bits(off), before)
    assert off.num_candidates(COUNT, 1) == COUNT
    candidates = GENOME.sample(COUNT, keyed_generator(1, "candidates"))
    assert torch.equal(choose(off, archive), candidates)


def test_the_first_places_are_the_strategys_own() -> None:
    made, archive = make_surrogate(guided_share=0.25, candidates=6), filled(40)
    made.train(archive, 0)
    assert made.num_candidates(COUNT, 1) == 15 + 5 * 3
    candidates = GENOME.sample(30, keyed_generator(1, "candidates"))
    chosen = choose(made, archive)
    assert torch.equal(chosen[:15], candidates[:15])
    assert not torch.equal(chosen[15:], candidates[15:20])


def test_what_is_chosen_is_new_in_order_and_of_the_asked_count() -> None:
    made, archive = make_surrogate(), filled(60)
    made.train(archive, 0)
    old = archive.designs[:9]
    candidates = GENOME.sample(made.num_candidates(COUNT, 1), keyed_generator(1, "candidates"))
    candidates[:9], candidates[10:13] = old, candidates[9]  # known ones, and one four times
    chosen = made.choose(candidates, archive, old, archive.costs[:9], COUNT, 1)
    assert len(chosen) == COUNT == len(set(GENOME.keys(chosen)))
    assert archive.find(chosen) == [None] * COUNT
    assert torch.equal(GENOME.repair(chosen), chosen)


def test_a_genome_with_too_few_new_designs_repeats_some() -> None:
    genome = Genome([ChoiceGene("a", tuple(range(5))), ChoiceGene("b", (0, 1, 2))])
    archive = DesignArchive(genome, 1)
    designs = torch.cartesian_prod(torch.arange(5.0), torch.arange(3.0)).double()[:12]
    archive.add(designs, designs.sum(1, keepdim=True), 0, {})
    made = Surrogate(genome, 1, NetworkSettings(steps=2, global_batch=16, lanes=1), World(), 0)
    made.train(archive, 0)
    candidates = genome.sample(made.num_candidates(8, 1), keyed_generator(0, "candidates"))
    chosen = made.choose(candidates, archive, designs, archive.costs, 8, 1)
    assert len(chosen) == 8 and torch.equal(genome.repair(chosen), chosen)


def test_it_learns_what_costs_and_steers_by_it() -> None:
    made, archive = make_surrogate(steps=60), filled(60, 60)
    reports = [made.train(archive, 0), made.train(archive, 1)]
    assert reports[0].keys() == {"value_loss", "failure_loss", "policy_loss"}
    assert reports[1]["value_loss"] < reports[0]["value_loss"] and reports[1]["policy_loss"] < reports[0]["policy_loss"]
    chosen = choose(made, archive)
    own, guided = costs_of(chosen[: COUNT // 2]), costs_of(chosen[COUNT // 2 :])
    assert guided.median() < 0.5 * own.median()


def test_the_forecast_is_judged_before_it_learns() -> None:
    first, both = filled(100), filled(100, 30)
    made = make_surrogate(steps=60)
    made.train(first, 0)
    correlation = made.train(both, 1)["rank_correlation"]
    assert 0.7 < correlation < 1.0
    shuffled = filled(100)
    shuffled.add(both.designs[100:], both.costs[100:].flip(0), 1, {})
    misled = make_surrogate(steps=60)
    misled.train(shuffled, 0)
    assert misled.train(shuffled, 1)["rank_correlation"] < correlation - 0.3


def test_the_policy_alone_steers_too() -> None:
    """Two candidates per place, one of each kind, and a value network that has learned nothing."""
    made, archive = (
        make_surrogate(steps=60, guided_share=1.0, candidates=2, curriculum=(CurriculumStage(value=0.0),)),
        filled(200),
    )
    made.train(archive, 0)
    chosen = choose(made, archive, count=100)
    candidates = GENOME.sample(100, keyed_generator(1, "candidates"))
    thought_up = [key not in set(GENOME.keys(candidates)) for key in GENOME.keys(chosen)]
    assert sum(thought_up) > 20
    assert costs_of(chosen[thought_up]).median() < 0.6 * costs_of(candidates).median()


def test_training_again_from_the_same_gives_the_same_bits() -> None:
    archive = filled(60)
    one, other, third = make_surrogate(), make_surrogate(), make_surrogate(seed=8)
    reports = [each.train(archive, 0) for each in (one, other, third)]
    assert reports[0] == reports[1] != reports[2] and are_equal(bits(one), bits(other))
    assert torch.equal(choose(one, archive), choose(other, archive))
    assert not torch.equal(choose(one, archive), choose(third, archive))


def test_it_continues_from_its_state_with_the_same_bits() -> None:
    archive = filled(60, 60)
    whole, began = make_surrogate(), make_surrogate()
    for each in (whole, began):
        each.train(archive, 0)
    resumed = make_surrogate()
    resumed.load_state_dict(began.state_dict())
    for generation in (1, 2):
        assert torch.equal(choose(whole, archive, generation), choose(resumed, archive, generation))
        assert whole.train(archive, generation) == resumed.train(archive, generation)
        assert are_equal(bits(whole), bits(resumed))


def test_it_continues_from_an_untrained_state() -> None:
    began, resumed = make_surrogate(), make_surrogate(seed=9)
    resumed.load_state_dict(began.state_dict())
    assert resumed.num_candidates(COUNT, 1) == COUNT


def test_it_trains_every_n_generations() -> None:
    archive = filled(60)
    made = make_surrogate(train_every=3)
    assert [bool(made.train(archive, generation)) for generation in range(5)] == [True, False, False, True, False]


def test_a_stage_decides_how_much_is_guided_and_what_is_learned() -> None:
    made, archive = (
        make_surrogate(
            candidates=8, curriculum=(CurriculumStage(2, guided_share=0.0), CurriculumStage(4, guided_share=1.0))
        ),
        filled(60),
    )
    made.train(archive, 0)
    assert [made.num_candidates(COUNT, generation) for generation in (1, 2, 4)] == [10 + 40, 20, 80]
    assert torch.equal(choose(made, archive, 3), GENOME.sample(COUNT, keyed_generator(3, "candidates")))
    reports = {
        name: make_surrogate(steps=60, curriculum=(CurriculumStage(**{name: 0.0}),)).train(archive, 0)
        for name in ("value", "policy")
    }
    assert reports["value"]["value_loss"] > 2 * reports["policy"]["value_loss"]
    assert reports["policy"]["policy_loss"] > reports["value"]["policy_loss"] + 0.1


@pytest.mark.parametrize("archive", [filled(5), filled(30, failed=range(30)), filled(30, failed=range(25))])
def test_with_too_little_to_learn_from_the_strategy_is_used_alone(archive: DesignArchive) -> None:
    made = make_surrogate()
    assert made.train(archive, 0) == {}
    assert made.num_candidates(COUNT, 1) == COUNT
    assert torch.equal(choose(made, archive), GENOME.sample(COUNT, keyed_generator(1, "candidates")))


def test_if_all_survivors_failed_the_strategy_is_used_alone() -> None:
    made, archive = make_surrogate(), filled(60, failed=range(10))
    made.train(archive, 0)
    candidates = GENOME.sample(made.num_candidates(COUNT, 1), keyed_generator(1, "candidates"))
    failed = archive.designs[:10], archive.costs[:10]
    assert torch.equal(made.choose(candidates, archive, *failed, COUNT, 1), candidates[:COUNT])


def test_designs_that_are_likely_to_fail_are_avoided() -> None:
    archive = filled(300)
    is_bad = archive.designs[:, 0] > 2.0  # close to the best
    archive.costs[is_bad] = torch.inf
    made = make_surrogate(steps=100)
    made.train(archive, 0)
    chosen = choose(made, archive, count=40)
    assert (chosen[20:, 0] > 2.0).double().mean() < 0.5 * (chosen[:20, 0] > 2.0).double().mean()


def test_several_objectives() -> None:
    archive = DesignArchive(GENOME, 2)
    designs = GENOME.sample(120, keyed_generator(0, "designs"))
    costs = torch.cat([costs_of(designs), costs_of(designs.flip(0)) + designs[:, :1].abs()], 1)
    archive.add(designs, costs, 0, {})
    made = Surrogate(GENOME, 2, NetworkSettings(steps=8, global_batch=32, lanes=2, members=2, width=16), World(), 0)
    assert made.train(archive, 0)["value_loss"] > 0
    chosen = choose(made, archive)
    assert len(chosen) == COUNT and archive.find(chosen) == [None] * COUNT
    assert 0.0 < made.train(archive, 0)["rank_correlation"] <= 1.0, "it has learned something"


def test_how_many_are_compared_at_a_time_does_not_matter_to_one_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    made, archive = make_surrogate(), filled(60)
    made.train(archive, 0)
    at_once = choose(made, archive)
    monkeypatch.setattr("lockstep.search.surrogate._MAX_COMPARED", 20)
    assert torch.equal(choose(made, archive), at_once)


PARENTS = GENOME.sample(40, keyed_generator(3, "parents"))
SCALING = FeatureScaling.around(GENOME, PARENTS)


def network(**biases: float) -> SurrogateNetwork:
    """Return a network whose policy is the same everywhere: numbers 0–2, their spreads 3–5, options 6–8."""
    made = SurrogateNetwork(3, 3, 1, members=2, width=8, depth=1, generator=keyed_generator(0, "weights"))
    torch.nn.init.zeros_(made.policy.weight)
    with torch.no_grad():
        made.policy.bias[..., 3:6] = -4.0
        for column, bias in biases.items():
            made.policy.bias[..., int(column.removeprefix("c"))] = bias
    return made


def test_they_are_in_order_and_of_the_asked_count() -> None:
    designs = propose(network(c3=1.0, c4=1.0, c5=1.0), SCALING, PARENTS, 100, 2.0, keyed_generator(1, "draw"))
    assert designs.shape == (100, 4) and torch.equal(GENOME.repair(designs), designs)


def test_moves_are_the_policys() -> None:
    designs = propose(network(c0=0.5), SCALING, PARENTS[:1], 50, 2.0, keyed_generator(1, "draw"))
    moved = SCALING.numeric_features(designs) - SCALING.numeric_features(PARENTS[:1])
    torch.testing.assert_close(moved[:, 0].mean().item(), 0.5, atol=0.05, rtol=0.0)
    assert moved[:, 1].abs().max() < 0.1


def test_none_goes_farther_than_it_may() -> None:
    designs = propose(network(c0=-9.0), SCALING, PARENTS[:1], 50, 0.25, keyed_generator(1, "draw"))
    moved = SCALING.numeric_features(designs) - SCALING.numeric_features(PARENTS[:1])
    torch.testing.assert_close(moved[:, 0], torch.full((50,), -0.25, dtype=torch.float64))


def test_options_are_drawn_by_their_odds() -> None:
    designs = propose(network(c7=2.0), SCALING, PARENTS, 2000, 2.0, keyed_generator(1, "draw"))
    shares = designs[:, 1].long().bincount(minlength=3) / 2000
    expected = torch.tensor([0.0, 2.0, 0.0]).softmax(0)
    torch.testing.assert_close(shares, expected, atol=0.03, rtol=0.0)


def test_every_parent_has_its_turn() -> None:
    designs = propose(network(), SCALING, PARENTS, 1000, 2.0, keyed_generator(1, "draw"))
    nearest = (SCALING.numeric_features(designs)[:, None] - SCALING.numeric_features(PARENTS)).norm(dim=2).argmin(1)
    assert len(nearest.unique()) == len(PARENTS)
