"""What each gene of the wing measures. Here, and nowhere else, are its numbers turned into SI units.

A gene with an unknown unit, a unit of the wrong dimension, or bounds that make no sense in metres or radians (a span of
1.8 mm) is an error when the table is made, not a strange wing later.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.search.genome import Genome


class Unit(NamedTuple):
    dimension: str
    in_si: float  # what one of it is in the SI unit of its dimension


class Quantity(NamedTuple):
    """What a number of the wing measures, and between which SI values it can make sense at all."""

    dimension: str
    low: float
    high: float


UNITS: Mapping[str, Unit] = {
    "m": Unit("length", 1.0),
    "mm": Unit("length", 1e-3),
    "deg": Unit("angle", math.pi / 180),
    "rad": Unit("angle", 1.0),
    "": Unit("ratio", 1.0),
}


class Converter:
    """From a population, in the genes' units, to columns of SI values by the genes' names."""

    def __init__(self, genome: Genome, quantities: Mapping[str, Quantity]) -> None:
        missing = [name for name in quantities if name not in genome.names]
        unknown = [name for name in genome.names if name not in quantities]
        if missing or unknown:
            raise UserError(f"the wing's genes: missing {missing}, unknown {unknown}; expected {list(quantities)}")
        self.names = genome.names
        self.factors = torch.tensor(
            [_factor(gene.name, gene.unit, gene.low, gene.high, quantities[gene.name]) for gene in genome.genes],
            dtype=torch.float64,
        )

    def to_si(self, designs: Tensor) -> dict[str, Tensor]:
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
