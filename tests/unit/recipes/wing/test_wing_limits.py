"""Rules: each is measured on the wing, costs nothing inside, and grows smoothly outside."""

import math

import pytest
import torch

from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.wing_limits import (
    CARBONS,
    PLATE_M,
    PLY_M,
    PYLON_M,
    WING_RULES,
    Strain,
    is_kept,
    smooth,
    strain,
)
from tests.unit.recipes.wing.wings import column, design

NAMES = [rule.name for rule in WING_RULES]


@pytest.mark.parametrize(
    ("rule", "changes"),
    [
        ("span", {"span": 2.0}),
        ("length", {"main_chord": 0.4, "flap_chord": 0.2}),
        ("lowest point", {"ride_height": 0.04}),
        ("highest point", {"endplate_height": 0.3}),
        ("highest point", {"flap_chord": 0.25, "flap_angle": 40.0, "ride_height": 0.14, "endplate_height": 0.1}),
        ("slot", {"slot_gap": 25.0}),
        ("endplate length", {"endplate_length": 0.6}),
    ],
)
def test_each_rule_sees_its_offender_alone(rule: str, changes: dict[str, float]) -> None:
    found = Assessor().assess(design(**changes))
    broken = [name for name, value in zip(NAMES, found.rules[0].tolist(), strict=True) if value > 0]
    assert broken == [rule]
    assert not found.is_legal


def test_the_base_design_is_legal() -> None:
    found = Assessor().assess(design())
    assert found.is_legal and found.rules.sum() == 0 and found.structure.sum() == 0


def test_a_violation_begins_without_a_jump_and_goes_on_growing() -> None:
    excess = torch.tensor([0.0, 1e-4, 1.0, 10.0, 100.0], dtype=torch.float64)
    found = smooth(excess)
    assert found[0] == 0 and found[1] < 1e-8
    assert (found[4] / found[3]).item() == pytest.approx(11, rel=0.02)


def test_what_is_over_by_less_than_the_tolerance_is_kept() -> None:
    over = smooth(torch.tensor([[0.9, 0.0], [1.1, 0.0]], dtype=torch.float64))
    assert is_kept(over).tolist() == [True, False]


def strain_of(**changes: object) -> Strain:
    return Assessor().assess(design(**changes)).strain


def test_a_pair_of_round_tubes_bends_as_a_handbook_says() -> None:
    turn = torch.linspace(0, -2 * math.pi, 401, dtype=torch.float64)
    circle = 0.03 * torch.stack([turn.cos(), turn.sin()], dim=1)
    points = torch.stack([circle, circle + 0.2]).unsqueeze(0)
    values = {"carbon": column(0), "plies": column(4), "span": column(1.8)}
    values |= {"endplate_height": column(0.2), "endplate_length": column(0.5)}
    found = strain(points, values, column(3600.0))
    carbon, wall, arm, load = CARBONS["standard"], 4 * PLY_M, 0.9 - PYLON_M, 2000.0
    second_moment = 2 * math.pi * 0.03**3 * wall
    assert found.deflection_m.item() == pytest.approx(
        load * arm**4 / (8 * carbon.stiffness_pa * second_moment), rel=1e-3
    )
    stress = load * arm**2 / 2 * 0.03 / second_moment
    assert found.stress_share.item() == pytest.approx(stress / carbon.strength_pa, rel=1e-3)
    volume = 2 * 2 * math.pi * 0.03 * wall * 1.8 + 2 * 0.2 * 0.5 * PLATE_M
    assert found.mass_kg.item() == pytest.approx(carbon.density * volume, rel=1e-3)


def test_plies_and_thickness_stiffen_and_plies_weigh() -> None:
    base, more, thicker = strain_of(), strain_of(plies=8), strain_of(main_thickness=0.16)
    assert more.deflection_m < base.deflection_m and thicker.deflection_m < base.deflection_m
    assert more.mass_kg > 1.3 * base.mass_kg
    assert (more.deflection_m / base.deflection_m).item() == pytest.approx(5 / 8)


def test_stiffer_carbon_bends_less_and_is_nearer_to_breaking() -> None:
    base, other = strain_of(), strain_of(carbon="high_modulus")
    assert other.deflection_m < base.deflection_m
    assert other.stress_share > base.stress_share
