"""The wing's genes, their bounds, and the conversion of their units to SI.

The bounds span what a designer would try, some of it beyond what the rules allow. The numbers are our own, in the style
of Formula 1's rules and wings. Units are converted here and nowhere else: a gene with an unknown unit, a unit of the
wrong dimension, or bounds that make no sense in metres or radians (a span of 1.8 mm) is an error when the table is
made.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.recipes.wing.geometry import THICKEST_AT
from lockstep.recipes.wing.wing_limits import CARBONS
from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene


class UnitConversion(NamedTuple):
    """A unit in terms of SI."""

    dimension: str
    in_si: float  # one of this unit, in the SI unit of its dimension


class Quantity(NamedTuple):
    """What a gene measures, and the range of SI values that makes sense."""

    dimension: str
    low: float
    high: float


UNITS: Mapping[str, UnitConversion] = {
    "m": UnitConversion("length", 1.0),
    "mm": UnitConversion("length", 1e-3),
    "deg": UnitConversion("angle", math.pi / 180),
    "rad": UnitConversion("angle", 1.0),
    "": UnitConversion("ratio", 1.0),
}


class Converter:
    """Converts a population from the genes' units to columns of SI values, by gene."""

    def __init__(self, genome: Genome, quantities: Mapping[str, Quantity]) -> None:
        missing = [name for name in quantities if name not in genome.names]
        unknown = [name for name in genome.names if name not in quantities]
        if missing or unknown:
            raise UserError(f"the wing's genes: expected {list(quantities)}; missing {missing}, unknown {unknown}")
        self.names = genome.names
        self.factors = torch.tensor(
            [_factor(gene.name, gene.unit, gene.low, gene.high, quantities[gene.name]) for gene in genome.genes],
            dtype=torch.float64,
        )

    def to_si(self, designs: Tensor) -> dict[str, Tensor]:
        """Return a column of SI values for each gene, by name."""
        return dict(zip(self.names, (designs * self.factors).unbind(1), strict=True))


def _factor(name: str, symbol: str, low: float, high: float, quantity: Quantity) -> float:
    unit = UNITS.get(symbol)
    if unit is None or unit.dimension != quantity.dimension:
        known = ", ".join(each or "none" for each, other in UNITS.items() if other.dimension == quantity.dimension)
        raise UserError(f"gene {name}: expected a unit of {quantity.dimension} ({known}), got {symbol or 'none'}")
    if not (quantity.low <= low * unit.in_si and high * unit.in_si <= quantity.high):
        raise UserError(
            f"gene {name}: {low:g} … {high:g} {symbol} is not within {quantity.low:g} … {quantity.high:g} in SI units; "
            "give other bounds or another unit"
        )
    return unit.in_si


_LENGTH = Quantity("length", 0.02, 3.0)
_SLOT = Quantity("length", -0.05, 0.05)
_SHARE = Quantity("ratio", 0.0, 1.0)
_ANGLE = Quantity("angle", -1.0, 1.0)
_NUMBER = Quantity("ratio", 0.0, 100.0)

QUANTITIES: Mapping[str, Quantity] = {
    "span": Quantity("length", 0.5, 3.0),
    "ride_height": _LENGTH,
    "main_chord": _LENGTH,
    "main_camber": _SHARE,
    "main_camber_at": _SHARE,
    "main_thickness": _SHARE,
    "main_thickest": _NUMBER,
    "main_angle": _ANGLE,
    "flap_chord": _LENGTH,
    "flap_camber": _SHARE,
    "flap_camber_at": _SHARE,
    "flap_thickness": _SHARE,
    "flap_angle": _ANGLE,
    "slot_gap": _SLOT,
    "slot_overlap": _SLOT,
    "endplate_height": _LENGTH,
    "endplate_length": _LENGTH,
    "plies": _NUMBER,
    "carbon": _NUMBER,
}


def wing_genome() -> Genome:
    """Return the genome of a two-element wing."""
    return Genome(
        [
            FloatGene("span", 1.4, 2.1, group="plan", unit="m"),
            FloatGene("ride_height", 0.03, 0.20, group="plan", unit="m"),  # of the lowest point, above the ground
            FloatGene("main_chord", 0.18, 0.40, group="main", unit="m"),
            FloatGene("main_camber", 0.0, 0.09, group="main"),  # shares of the element's chord
            FloatGene("main_camber_at", 0.3, 0.6, group="main"),
            FloatGene("main_thickness", 0.06, 0.18, group="main"),
            ChoiceGene("main_thickest", THICKEST_AT, group="main"),
            FloatGene("main_angle", -6.0, 10.0, group="main", unit="deg"),  # positive: more downforce
            FloatGene("flap_chord", 0.08, 0.25, group="flap", unit="m"),
            FloatGene("flap_camber", 0.0, 0.09, group="flap"),
            FloatGene("flap_camber_at", 0.3, 0.6, group="flap"),
            FloatGene("flap_thickness", 0.06, 0.16, group="flap"),
            FloatGene("flap_angle", 5.0, 40.0, group="flap", unit="deg"),  # from the main element's chord
            FloatGene("slot_gap", 3.0, 30.0, group="slot", unit="mm"),
            FloatGene("slot_overlap", -10.0, 25.0, group="slot", unit="mm"),
            FloatGene("endplate_height", 0.10, 0.40, group="endplate", unit="m"),
            FloatGene("endplate_length", 0.20, 0.70, group="endplate", unit="m"),
            IntegerGene("plies", 2, 12, group="shell"),
            ChoiceGene("carbon", tuple(CARBONS), group="shell"),
        ]
    )


BASE: Mapping[str, Any] = {
    "span": 1.8,
    "ride_height": 0.08,
    "main_chord": 0.28,
    "main_camber": 0.04,
    "main_camber_at": 0.45,
    "main_thickness": 0.12,
    "main_thickest": 0.3,
    "main_angle": 1.0,
    "flap_chord": 0.14,
    "flap_camber": 0.04,
    "flap_camber_at": 0.45,
    "flap_thickness": 0.10,
    "flap_angle": 18.0,
    "slot_gap": 10.0,
    "slot_overlap": 4.0,
    "endplate_height": 0.20,
    "endplate_length": 0.45,
    "plies": 5,
    "carbon": "standard",
}
"""A conservative wing to start from."""
