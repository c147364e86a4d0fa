"""The panel method compared with two other programs, where they are installed."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.panels import circulation, forces, solve
from tests.unit.recipes.wing.wings import design, section, upright, upside_down


@pytest.fixture
def aerosandbox() -> Any:
    return imported("aerosandbox")


@pytest.fixture
def neuralfoil() -> Any:
    return imported("neuralfoil")


def imported(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        return pytest.importorskip(name)


def their_circulation(aerosandbox: Any, points: Tensor, *, ground: bool) -> float:
    """Return their circulation around outlines (elements, points, 2); theirs run in the other direction."""
    airfoils = [aerosandbox.Airfoil(coordinates=outline.flip(0).numpy()) for outline in points]
    stream = aerosandbox.OperatingPoint(velocity=1.0, alpha=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = aerosandbox.AirfoilInviscid(airfoil=airfoils, op_point=stream, ground_effect=ground)
    return float(found.total_vorticity)


@pytest.mark.parametrize("degrees", [0.0, 6.0])
def test_a_section_far_from_the_ground(aerosandbox: Any, degrees: float) -> None:
    points = upright(section(0.04, 0.4, 0.12), degrees, 60)
    ours = circulation(points, solve(points, ground=False).level).item()
    assert ours == pytest.approx(their_circulation(aerosandbox, points[0], ground=False), rel=0.005)


@pytest.mark.parametrize("height", [0.15, 0.3, 1.0])
def test_a_section_near_the_ground(aerosandbox: Any, height: float) -> None:
    points = upside_down(section(0.04, 0.4, 0.12), 2.0, 60, height=height)
    ours = circulation(points, solve(points).level).item()
    assert ours == pytest.approx(their_circulation(aerosandbox, points[0], ground=True), rel=0.005)


def test_two_elements_near_the_ground(aerosandbox: Any) -> None:
    points = Assessor(num_panels=40).assess(design()).shape.points
    ours = circulation(points, solve(points).level).item()
    assert ours == pytest.approx(their_circulation(aerosandbox, points[0], ground=True), rel=0.005)


def test_the_lift_of_a_real_flow_is_a_little_less(neuralfoil: Any) -> None:
    """NeuralFoil has learnt from XFoil, with friction: that takes some five to fifteen per cent of the lift."""
    form = section(0.02, 0.4, 0.12)
    degrees = [-2.0, 0.0, 2.0, 4.0, 6.0]
    points = torch.cat([upright(form, angle, 80) for angle in degrees])
    ours = -forces(points, solve(points, ground=False).level).downforce.squeeze(1)
    outline = upright(form, 0.0, 80)[0, 0].flip(0).numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = neuralfoil.get_aero_from_coordinates(outline, alpha=degrees, Re=3e6, model_size="medium")["CL"]
    slope, their_slope = ((lift[-1] - lift[0]) / math.radians(8) for lift in (ours.tolist(), theirs.tolist()))
    assert 0.85 < their_slope / slope < 1.0
    assert max(abs(a - b) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)) < 0.12
