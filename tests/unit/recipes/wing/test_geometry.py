"""Sections and their places: thickness, camber, closed trailing edges, the slot, the ground."""

import math

import pytest
import torch

from lockstep.recipes.wing.fitness import Assessor
from lockstep.recipes.wing.geometry import THICKEST_AT, WingShape, half_thickness, mean_line, outline
from tests.unit.recipes.wing.wings import design, section


def shape_of(**changes: object) -> WingShape:
    return Assessor().assess(design(**changes)).shape


def test_the_original_thickness_is_that_of_the_four_digit_sections() -> None:
    x = torch.linspace(0.02, 0.98, 25, dtype=torch.float64)
    original = 5 * 0.12 * (0.2969 * x.sqrt() - 0.126 * x - 0.3516 * x**2 + 0.2843 * x**3 - 0.1036 * x**4)
    assert (half_thickness(section(0, 0.4, 0.12), x) - original).abs().max() < 0.0015  # but for the sharp trailing edge


@pytest.mark.parametrize("which", range(3))
def test_a_section_is_as_thick_as_asked_where_it_was_asked(which: int) -> None:
    x = torch.linspace(0, 1, 1001, dtype=torch.float64)
    half = half_thickness(section(0, 0.4, 0.1, which), x)[0]
    assert half.max().item() == pytest.approx(0.05, abs=1e-6)
    assert x[half.argmax()].item() == pytest.approx(THICKEST_AT[which], abs=0.002)
    assert (half[1:-1] > 0).all() and half[0] == 0 and half[-1] == 0


@pytest.mark.parametrize(("which", "slope"), [(0, 1.17), (1, 1.575), (2, 2.325)])
def test_a_section_ends_at_its_familys_angle(which: int, slope: float) -> None:
    x = torch.tensor([1 - 1e-6], dtype=torch.float64)
    assert half_thickness(section(0, 0.4, 0.1, which), x).item() == pytest.approx(0.1 * slope * 1e-6, rel=1e-4)


def test_the_mean_line_is_highest_where_it_was_asked_and_its_slope_is_its_derivative() -> None:
    x = torch.linspace(0, 1, 2001, dtype=torch.float64)
    height, slope = mean_line(section(0.04, 0.35, 0.1), x)
    assert height.max().item() == pytest.approx(0.04, abs=1e-6)
    assert x[height.argmax()].item() == pytest.approx(0.35, abs=0.001)
    torch.testing.assert_close(height.diff() / x.diff(), (slope[:, 1:] + slope[:, :-1]) / 2, atol=1e-4, rtol=0)


def test_an_outline_is_closed_at_its_trailing_edge() -> None:
    points = outline(section(0.04, 0.4, 0.12), 40)
    assert torch.equal(points[:, 0], points[:, -1])
    assert points[0, 20].tolist() == [0.0, 0.0]


def test_the_lowest_point_is_at_the_ride_height() -> None:
    assert shape_of(ride_height=0.07).points[..., 1].min().item() == pytest.approx(0.07, abs=1e-12)


def test_a_flap_stands_above_and_behind_the_main_element_and_turns_up() -> None:
    main, flap = shape_of().points[0]
    assert flap[:, 0].max() > main[:, 0].max() and flap[:, 1].max() > main[:, 1].max()
    assert flap[0, 1] > flap[20, 1]  # its trailing edge is higher than its nose


def test_angles_are_of_the_chords_and_the_flaps_comes_on_top() -> None:
    main, flap = shape_of(main_angle=3.0, flap_angle=20.0).points[0]
    for outline_, degrees in ((main, 3.0), (flap, 23.0)):
        along, up = (outline_[0] - outline_[20]).tolist()
        assert math.degrees(math.atan2(up, along)) == pytest.approx(degrees)


@pytest.mark.parametrize("place", THICKEST_AT)
def test_the_main_element_is_thickest_where_its_gene_says(place: float) -> None:
    main = shape_of(main_thickest=place, main_angle=0.0).points[0, 0]
    nose, trailing_edge = main[20], main[0]
    thickest = (main[:20] - main[21:].flip(0)).norm(dim=1).argmax()  # of the pairs of points above and below the chord
    along = (main[:20] + main[21:].flip(0))[thickest, 0] / 2
    assert ((along - nose[0]) / (trailing_edge[0] - nose[0])).item() == pytest.approx(place, abs=0.05)


def test_the_clearance_is_from_the_sides_not_from_the_corners() -> None:
    coarse, fine = (Assessor(panels).assess(design(slot_overlap=20.0)).shape.clearance for panels in (24, 240))
    assert coarse.item() == pytest.approx(fine.item(), abs=2e-4)


def test_the_slot_is_about_as_wide_as_asked() -> None:
    for gap in (6.0, 10.0, 14.0):
        assert shape_of(slot_gap=gap, slot_overlap=8.0).clearance.item() == pytest.approx(gap / 1000, rel=0.15)


def test_elements_that_run_into_each_other_are_found() -> None:
    possible = shape_of()
    crossing = shape_of(slot_gap=3.0, slot_overlap=25.0, flap_angle=40.0, flap_thickness=0.16, flap_chord=0.25)
    assert possible.is_possible.item() and not crossing.is_possible.item()
