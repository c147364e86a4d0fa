"""Fitness: each row for itself, impossible ones alone are not numbers, weights weigh."""

import pytest
import torch

from lockstep.recipes.wing.fitness import PARETO_OBJECTIVES, Assessor, FitnessWeights
from lockstep.world.keyed_random import keyed_generator
from tests.unit.recipes.wing.wings import design

# Elements that cut each other, though every corner is more than a millimetre off; and some that nearly touch.
CROSSING = {"main_chord": 0.355, "main_camber": 0.034, "main_camber_at": 0.403, "main_thickness": 0.109}
CROSSING |= {"main_thickest": 0.5, "main_angle": 0.78, "flap_chord": 0.155, "flap_camber": 0.00468}
CROSSING |= {"flap_thickness": 0.108, "flap_angle": 32.67, "slot_gap": 3.4, "slot_overlap": 24.37}
TOUCHING = {"slot_gap": 3.0, "slot_overlap": 0.0, "flap_chord": 0.25, "flap_thickness": 0.16}


def test_many_at_a_time_are_as_one_by_one() -> None:
    assessor = Assessor()
    designs = assessor.genome.sample(21, keyed_generator(3, "designs"))
    together = assessor.fitness(designs)
    alone = torch.cat([assessor.fitness(row.unsqueeze(0)) for row in designs])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12, equal_nan=True)
    assert torch.equal(together.nan_to_num(), assessor.fitness(designs).nan_to_num())


@pytest.mark.parametrize("impossible", [CROSSING, TOUCHING])
@pytest.mark.parametrize("evaluate", ["fitness", "trade"])
def test_an_impossible_wing_is_not_a_number_and_harms_no_other(evaluate: str, impossible: dict[str, float]) -> None:
    assessor = Assessor()
    function = getattr(assessor, evaluate)
    values = function(torch.cat([design(), design(**impossible), design(span=1.7)]))
    assert values.isnan().all(1).tolist() == [False, True, False]
    torch.testing.assert_close(values[[0, 2]], function(torch.cat([design(), design(span=1.7)])), rtol=1e-12, atol=0)


def test_most_random_wings_can_be_evaluated_and_few_are_legal() -> None:
    assessor = Assessor(num_panels=16)
    found = assessor.assess(assessor.genome.sample(200, keyed_generator(0, "designs")))
    assert found.fitness.isfinite().double().mean() > 0.9
    assert 0.005 < found.is_legal.double().mean() < 0.2


def test_fitness_is_downforce_less_drag_for_a_legal_wing() -> None:
    found = Assessor(weights=FitnessWeights(performance=2.0, drag=4.0)).assess(design())
    expected = 2.0 * (found.loads.downforce - 4.0 * found.loads.drag) / 1000
    torch.testing.assert_close(found.fitness, expected)


def test_rules_and_structure_cost_by_their_weights() -> None:
    offender = design(span=2.0, plies=2)

    def fitness(**weights: float) -> float:
        return Assessor(weights=FitnessWeights(**weights)).assess(offender).fitness.item()

    found = Assessor().assess(offender)
    assert found.rules.sum() > 0 and found.structure.sum() > 0
    free = fitness(rules=0.0, structure=0.0)
    assert free - fitness(rules=1.0, structure=0.0) == pytest.approx(found.rules.sum().item())
    assert free - fitness(rules=0.0, structure=3.0) == pytest.approx(3 * found.structure.sum().item())


def test_a_trade_has_a_column_an_objective_and_offenders_are_worse_in_all() -> None:
    assessor = Assessor()
    legal, offender = design(), design(endplate_length=0.6)
    for row in (legal, offender):
        found = assessor.assess(row)
        plain = torch.stack([found.loads.downforce, found.loads.drag, found.strain.deflection_m], dim=1)
        worse = torch.tensor([each.direction == "min" for each in PARETO_OBJECTIVES])
        change = torch.where(worse, 1, -1) * (assessor.trade(row) - plain)
        assert (change > 0).all() if row is offender else (change == 0).all()
