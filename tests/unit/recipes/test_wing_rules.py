"""Rules: each is measured on the wing, costs nothing inside, and grows smoothly outside."""

import pytest
import torch

from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.rules import RULES, is_kept, smooth
from tests.unit.recipes.wings import design

NAMES = [rule.name for rule in RULES]


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
