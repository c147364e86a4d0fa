"""From pressures to newtons: span, endplates, friction, separation."""

import math

import pytest
import torch

from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.forces import Air, BoundaryLayer, Loads, boundary_layer, with_wash
from lockstep.recipes.wing.panels import circulation, forces, solve
from tests.unit.recipes.wing.wings import column, design, section, upright


def loads_of(**changes: object) -> Loads:
    return Assessor().assess(design(**changes)).loads


def test_a_wing_far_from_the_ground_has_the_lift_slope_of_lifting_line_theory() -> None:
    points = upright(section(0, 0.4, 0.06), 4.0, 80, height=500.0)
    flow = solve(points)
    lift = -forces(points, flow.level).downforce.sum().item()
    speeds, wash = with_wash(points, flow, column(8.0), column(0.0), column(1.0))
    finite = -forces(points, speeds, wash).downforce.sum().item()
    slope = lift / math.radians(4)
    assert finite / lift == pytest.approx(1 / (1 + slope / (math.pi * 8.0)), rel=0.01)
    assert wash.item() == pytest.approx(-finite / (math.pi * 8.0), rel=0.01)  # downwash, for a wing that lifts


def test_the_wash_is_what_its_own_circulation_makes() -> None:
    points = Assessor().assess(design()).shape.points
    flow = solve(points)
    speeds, wash = with_wash(points, flow, column(1.8), column(0.0), column(0.5))
    height = points[..., 1].mean().item()
    ground = (16 * height / 1.8) ** 2 / (1 + (16 * height / 1.8) ** 2)
    assert wash.item() == pytest.approx(-ground * 2 * circulation(points, speeds).item() / (math.pi * 1.8), rel=1e-9)


def test_larger_endplates_bring_downforce_as_long_as_they_cover_the_wing() -> None:
    low, high, short = (
        loads_of(endplate_height=height, endplate_length=length)
        for height, length in ((0.10, 0.55), (0.30, 0.55), (0.30, 0.20))
    )
    assert high.downforce > short.downforce > low.downforce
    assert high.plates > short.plates and high.plates > low.plates
    assert high.wash < low.wash
    longer, longest = (loads_of(endplate_length=length) for length in (0.55, 0.70))
    assert longer.downforce == longest.downforce and longer.drag < longest.drag


def test_a_flat_plate_has_a_flat_plates_friction() -> None:
    """A very thin section along the stream, wet on both sides: Prandtl's power law, which Buri's method contains."""
    points = upright(section(0, 0.4, 0.01), 0.0, 120)
    air = Air()
    even = torch.ones(1, 1, 121, dtype=torch.float64)
    even[..., :61] = -1.0
    loss = boundary_layer(points, even, air.kinematic_viscosity, air.speed).momentum_loss.item()
    reynolds = air.speed / air.kinematic_viscosity
    assert 2 * loss == pytest.approx(2 * 0.074 * reynolds**-0.2, rel=0.05)


@pytest.mark.parametrize("fall", [0.3, 0.6, 0.9])
def test_a_layer_comes_off_where_buris_number_says(fall: float) -> None:
    """For speeds of 1 − fall × way it is 0.0032 (U⁻⁵ − 1): 0.06 is reached where the speed has come down to 0.551."""
    points = upright(section(0, 0.4, 0.001), 0.0, 200)
    side = torch.where(torch.arange(201) < 100, -1.0, 1.0)
    speeds = (side * (1 - fall * points[0, 0, :, 0])).reshape(1, 1, -1)
    share = min(1.0, 0.449 / fall / 0.97)  # the last 3% do not count
    assert boundary_layer(points, speeds, 1.46e-5, 60.0).attached.item() == pytest.approx(share, abs=0.02)


def test_the_layer_starts_where_the_flow_parts_also_within_a_panel() -> None:
    """The flow divides at a corner of a hexagon: both sides are the same."""
    turn = torch.arange(7, dtype=torch.float64) * -math.pi / 3
    points = torch.stack([turn.cos(), turn.sin()], dim=1).reshape(1, 1, 7, 2)  # of sides 1

    def found(at_corner: float) -> BoundaryLayer:
        speeds = torch.tensor([-1, -1, -1, at_corner, 1, 1, 1], dtype=torch.float64).reshape(1, 1, 7)
        return boundary_layer(points, speeds, 1.0, 1.0)

    one_side = (0.016 * 1.2) ** 0.8  # one side at speed 1, and a fifth of the one on which it grows
    assert found(0.0).momentum_loss.item() == pytest.approx(2 * one_side, rel=1e-9)
    assert found(0.01).attached.item() > 0.99  # its speeds only grow


def test_each_element_keeps_what_separation_leaves() -> None:
    found = loads_of(flap_angle=38.0, ride_height=0.045)
    points = Assessor().assess(design(flap_angle=38.0, ride_height=0.045)).shape.points
    ideal = (Air().dynamic_pressure * 1.8 * forces(points, found.speeds, found.wash).downforce)[0]
    main, flap = ((1 + found.attached[0].sqrt()) / 2).square().tolist()
    assert main < 0.95 and flap < 0.95
    real = found.downforce_by_element[0]
    assert (real / ideal).tolist() == pytest.approx([main * flap, flap])
    assert found.induced.item() == pytest.approx((real.sum() ** 2 / ideal.sum() * found.wash).item())


def test_endplates_have_a_flat_plates_friction() -> None:
    found = loads_of(endplate_height=0.2, endplate_length=0.5).plates.item()
    reynolds = 60.0 * 0.5 / 1.46e-5
    assert found == pytest.approx(0.5 * 1.225 * 60.0**2 * 4 * 0.2 * 0.5 * 0.074 * reynolds**-0.2)


def test_a_steep_flap_stalls_and_pays() -> None:
    gentle, steep = (loads_of(flap_angle=angle, slot_gap=15.0) for angle in (12.0, 40.0))
    assert gentle.attached.min() > 0.9
    assert steep.attached[0, 1] < 0.6
    assert steep.separated > 10 * gentle.separated


def test_without_separation_nothing_is_lost() -> None:
    found = loads_of(flap_angle=8.0, ride_height=0.15)
    shape = Assessor().assess(design(flap_angle=8.0, ride_height=0.15)).shape
    ideal = Air().dynamic_pressure * 1.8 * forces(shape.points, found.speeds, found.wash).downforce.sum()
    assert found.downforce.item() == pytest.approx(ideal.item(), rel=0.02)


def test_downforce_grows_towards_the_ground_until_the_flow_comes_off() -> None:
    found = [loads_of(ride_height=height).downforce.item() for height in (0.03, 0.04, 0.06, 0.10, 0.20)]
    assert found[4] < found[3] < found[2] < found[1]
    assert found[0] < found[1]


def test_drag_is_the_sum_of_its_parts_and_forces_grow_with_speed_squared() -> None:
    found = loads_of()
    torch.testing.assert_close(found.drag, found.induced + found.profile + found.separated + found.plates)
    fast = Assessor(air=Air(speed=120.0)).assess(design()).loads
    assert (fast.downforce / found.downforce).item() == pytest.approx(4.0)
    assert 3.4 < (fast.profile / found.profile).item() < 3.6  # friction's coefficient falls as the fifth root
