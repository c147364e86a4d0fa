"""The beam: against formulas for a plain tube, and in the right directions."""

import math

import pytest
import torch

from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.structure import CARBONS, PLATE_M, PLY_M, PYLON_M, Strain, strain
from tests.unit.recipes.wings import column, design


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
