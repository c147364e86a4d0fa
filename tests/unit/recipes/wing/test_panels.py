"""The panel method against theory: thin-airfoil lift, NACA sections, the ground, the slot."""

import math
from itertools import pairwise

import pytest
import torch

from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.geometry import AirfoilSection
from lockstep.recipes.wing.panels import circulation, forces, pressure, solve, velocity
from tests.unit.recipes.wing.wings import design, section, upright, upside_down


def lift(form: AirfoilSection, degrees: float, num_panels: int) -> float:
    """Far from any ground."""
    points = upright(form, degrees, num_panels)
    return -forces(points, solve(points, ground=False).level).downforce.item()


def downforce(form: AirfoilSection, degrees: float, height: float, num_panels: int = 60) -> float:
    points = upside_down(form, degrees, num_panels, height=height)
    return forces(points, solve(points).level).downforce.item()


def lift_slope(form: AirfoilSection, num_panels: int) -> float:
    """Return the lift slope per radian."""
    return (lift(form, 2, num_panels) - lift(form, -2, num_panels)) / math.radians(4)


def test_in_the_limit_of_no_thickness_a_section_lifts_as_theory_says() -> None:
    four, eight = (lift_slope(section(0, 0.4, thickness), 100) / (2 * math.pi) for thickness in (0.04, 0.08))
    assert 2 * four - eight == pytest.approx(1.0, abs=0.005)


def test_the_lift_slope_converges_with_the_panels() -> None:
    few, more, many, most = (lift_slope(section(0, 0.4, 0.06), panels) for panels in (20, 40, 80, 160))
    assert abs(few - most) > 4 * abs(more - most) > 16 * abs(many - most)


@pytest.mark.parametrize(
    ("camber", "at", "zero_lift"),  # thin-airfoil theory for the two parabolas, in degrees
    [(0.02, 0.4, -2.08), (0.04, 0.4, -4.15)],
)
def test_naca_sections_have_their_angle_of_zero_lift(camber: float, at: float, zero_lift: float) -> None:
    form = section(camber, at, 0.12)
    slope = lift_slope(form, 80)
    assert -math.degrees(lift(form, 0, 80) / slope) == pytest.approx(zero_lift, rel=0.06)
    assert slope / (2 * math.pi) == pytest.approx(1.10, abs=0.01)  # 12% thickness adds a tenth


def test_a_symmetric_section_at_no_angle_has_no_lift() -> None:
    assert abs(lift(section(0, 0.4, 0.12), 0, 40)) < 1e-12


def test_there_is_no_drag_without_friction_and_lift_is_circulation() -> None:
    points = upright(section(0.04, 0.4, 0.12), 4, 120)
    speeds = solve(points, ground=False).level
    found = forces(points, speeds)
    assert abs(found.drag.item()) < 1e-3
    assert -found.downforce.item() == pytest.approx(2 * circulation(points, speeds).item(), rel=1e-3)
    # Without camber a thin section's lift acts at a quarter of the chord.
    flat = upright(section(0, 0.4, 0.06), 3, 120)
    pull = forces(flat, solve(flat, ground=False).level)
    assert pull.moment.item() / -pull.downforce.item() == pytest.approx(0.25, abs=0.01)


def test_both_sides_leave_the_trailing_edge_at_one_speed() -> None:
    flow = solve(Assessor().assess(design()).shape.points)
    for speeds in flow:
        assert (speeds[..., 0] + speeds[..., -1]).abs().max() < 1e-12


def test_the_speed_at_the_trailing_edge_goes_on_from_the_corners_before_it() -> None:
    points = upright(section(0.02, 0.4, 0.08), 3.0, 40)
    speeds = solve(points, ground=False).level[0, 0].abs()
    sides = speeds, speeds.flip(0)
    mean = [sum(side[corner].item() for side in sides) / 2 for corner in range(3)]
    assert mean[0] == pytest.approx(mean[1] + (mean[1] - mean[2]) / 3, abs=1e-9)
    assert mean[0] == pytest.approx(mean[1], abs=0.05)


def test_no_air_goes_through_the_ground_nor_through_the_wing() -> None:
    points = Assessor().assess(design()).shape.points
    speeds = solve(points).level
    on_ground = torch.stack([torch.linspace(-0.5, 1, 31), torch.zeros(31)], dim=1).double().unsqueeze(0)
    wind = velocity(points, speeds, on_ground)
    assert wind[..., 1].abs().max() < 1e-8
    assert wind[..., 0].max() > 1.5  # it is fast under the wing
    inside = points[:, :, :-1].mean(2)
    assert velocity(points, speeds, inside)[:, 0].norm() < 0.02  # and still within its main element


def test_an_upside_down_wing_pushes_down_as_much_as_it_would_lift() -> None:
    form = section(0.04, 0.4, 0.12)
    assert downforce(form, 3, height=1000.0) == pytest.approx(lift(form, 3, 60), rel=2e-4)


def test_downforce_grows_towards_the_ground() -> None:
    form = section(0.04, 0.4, 0.12)
    found = [downforce(form, 2, height=height) for height in (0.15, 0.25, 0.4, 0.8, 1.6)]
    assert all(lower > higher for lower, higher in pairwise(found))
    assert found[0] > 1.5 * found[-1]


def test_the_number_of_panels_does_not_matter_much() -> None:
    coarse, fine = (Assessor(panels).assess(design()).shape.points for panels in (40, 120))
    one, other = (forces(points, solve(points).level).downforce.sum().item() for points in (coarse, fine))
    assert one == pytest.approx(other, rel=0.01)


def test_a_flap_raises_the_main_elements_circulation() -> None:
    points = Assessor().assess(design()).shape.points
    together = circulation(points[:, :1], solve(points).level[:, :1])
    alone = circulation(points[:, :1], solve(points[:, :1]).level)
    assert together.item() < 1.3 * alone.item() < 0  # clockwise is positive, and these turn the other way


def test_stagnation_is_the_highest_pressure() -> None:
    points = upright(section(0.02, 0.4, 0.12), 4, 120)
    found = pressure(solve(points, ground=False).level)
    assert 0.97 < found.max().item() <= 1.0


def test_a_design_without_a_solution_leaves_the_others_alone() -> None:
    points = Assessor().assess(design()).shape.points
    broken = points.clone()
    broken[:, 1] = broken[:, 0]  # the flap lies on the main element: the equations are singular
    nowhere = torch.full_like(points, math.nan)
    flow = solve(torch.cat([points, broken, nowhere, points])).level
    assert torch.equal(flow[0], flow[3]) and torch.equal(flow[:1], solve(points).level)
    assert flow[2].isnan().all()
    assert flow[1].isnan().all()
