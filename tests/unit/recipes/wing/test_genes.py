"""Units: a gene table with a wrong one is refused when it is made."""

import math
from dataclasses import replace

import pytest
import torch

from lockstep.errors import UserError
from lockstep.recipes.wing.genes import BASE, QUANTITIES, UNITS, Converter, wing_genome
from lockstep.search.genome import FloatGene, Genome


def with_gene(name: str, **changes: object) -> Genome:
    return Genome([replace(gene, **changes) if gene.name == name else gene for gene in wing_genome().genes])  # type: ignore[arg-type]


def test_lengths_become_metres_and_angles_radians() -> None:
    values = Converter(wing_genome(), QUANTITIES).to_si(wing_genome().row(BASE).unsqueeze(0))
    assert values["slot_gap"].item() == pytest.approx(BASE["slot_gap"] / 1000)
    assert values["flap_angle"].item() == pytest.approx(math.radians(BASE["flap_angle"]))
    assert values["span"].item() == BASE["span"]


def test_the_same_wing_in_other_units_has_the_same_si_values() -> None:
    in_millimetres = with_gene("span", low=1400.0, high=2100.0, unit="mm")
    row = in_millimetres.row({**BASE, "span": 1800.0}).unsqueeze(0)
    values = Converter(in_millimetres, QUANTITIES).to_si(row)
    torch.testing.assert_close(values["span"], torch.tensor([1.8], dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("span", {"unit": "ft"}, r"gene span: expected a unit of length \(m, mm\), got ft"),
        ("span", {"unit": "deg"}, r"gene span: expected a unit of length \(m, mm\), got deg"),
        ("main_angle", {"unit": ""}, r"gene main_angle: expected a unit of angle \(deg, rad\), got none"),
        ("main_camber", {"unit": "m"}, r"gene main_camber: expected a unit of ratio \(none\), got m"),
        ("span", {"unit": "mm"}, r"gene span: 1.4 … 2.1 mm is not within 0.5 … 3 in SI"),
        ("main_angle", {"unit": "rad"}, r"gene main_angle: -6 … 10 rad is not within -1 … 1 in SI"),
    ],
)
def test_a_wrong_unit_is_an_error_that_names_the_gene(name: str, changes: dict[str, str], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        Converter(with_gene(name, **changes), QUANTITIES)


def test_a_gene_that_is_missing_or_unknown_is_an_error() -> None:
    genes = [gene for gene in wing_genome().genes if gene.name != "span"]
    with pytest.raises(UserError, match=r"missing \['span'\], unknown \['width'\]"):
        Converter(Genome([*genes, FloatGene("width", 1.0, 2.0, unit="m")]), QUANTITIES)


def test_every_dimension_has_its_si_unit() -> None:
    assert {unit.dimension for unit in UNITS.values() if unit.in_si == 1.0} == {"length", "angle", "ratio"}
