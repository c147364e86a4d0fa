"""What a design is made of: named genes with bounds, in groups. A population is a table of their values.

    genome = Genome([
        FloatGene("span", 1.2, 1.8, group="plan", unit="m"),
        IntegerGene("elements", 1, 3, group="plan"),
        ChoiceGene("section", ("naca", "gurney"), group="profile"),
    ])

A population is a float64 tensor on the CPU, a row a design and a column a gene: the number itself, or of a choice the
number of the option. It is in order when `repair` changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.config.arguments import require_known
from lockstep.errors import UserError

_FARTHEST = 1e300  # from 0 that a bound may be: twice as far must still be a number, or there would be no range


@dataclass(frozen=True)
class FloatGene:
    """A number between two bounds, which belong to it."""

    name: str
    low: float
    high: float
    group: str = field(default="", kw_only=True)  # those of a group travel together in a crossover; without one, alone
    unit: str = field(default="", kw_only=True)

    is_whole = False

    def __post_init__(self) -> None:
        bounds = (self.low, self.high)
        if not all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in bounds):
            raise UserError(f"gene {self.name}: expected numbers as bounds, got {self.low!r} … {self.high!r}")
        if not (abs(self.low) <= _FARTHEST and abs(self.high) <= _FARTHEST and self.low <= self.high):
            raise UserError(
                f"gene {self.name}: expected bounds from {-_FARTHEST:g} to {_FARTHEST:g}, the lower first, "
                f"got {self.low} … {self.high}"
            )

    def read(self, value: float) -> Any:
        """What a column's number stands for."""
        return value

    def write(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise UserError(f"gene {self.name}: expected {self.expected}, got {value!r}")
        return float(value)

    @property
    def expected(self) -> str:
        return f"a number from {self.low:g} to {self.high:g}{self.unit and ' ' + self.unit}"


@dataclass(frozen=True)
class IntegerGene(FloatGene):
    """A whole number between two bounds."""

    low: int
    high: int

    is_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(isinstance(bound, int) and abs(bound) < 2**53 for bound in (self.low, self.high)):
            raise UserError(f"gene {self.name}: expected whole bounds, got {self.low} … {self.high}")

    def read(self, value: float) -> Any:
        return int(value)

    def write(self, value: Any) -> float:
        number = super().write(value)
        if not number.is_integer():
            raise UserError(f"gene {self.name}: expected {self.expected}, got {value!r}")
        return number

    @property
    def expected(self) -> str:
        return f"a whole number from {self.low} to {self.high}{self.unit and ' ' + self.unit}"


@dataclass(frozen=True)
class ChoiceGene:
    """One of some options, between which there is no order."""

    name: str
    options: tuple[str | int | float | bool, ...]
    group: str = field(default="", kw_only=True)

    unit = ""
    is_whole = True
    low = 0

    def __post_init__(self) -> None:
        if isinstance(self.options, str) or not all(isinstance(each, str | int | float) for each in self.options):
            raise UserError(f"gene {self.name}: expected a tuple of texts, numbers or flags, got {self.options!r}")
        object.__setattr__(self, "options", tuple(self.options))
        if not self.options or len(set(self.options)) < len(self.options):
            raise UserError(f"gene {self.name}: expected one option or more, each once, got {self.options}")

    @property
    def high(self) -> int:
        return len(self.options) - 1

    def read(self, value: float) -> Any:
        return self.options[int(value)]

    def write(self, value: Any) -> float:
        if value not in self.options:
            raise UserError(f"gene {self.name}: expected {self.expected}, got {value!r}")
        return float(self.options.index(value))

    @property
    def expected(self) -> str:
        return f"one of {', '.join(map(str, self.options))}"


Gene = FloatGene | IntegerGene | ChoiceGene


class Genome:
    """The genes of every design, in the order of a population's columns."""

    def __init__(self, genes: Sequence[Gene]) -> None:
        self.genes = tuple(genes)
        self.names = tuple(gene.name for gene in self.genes)
        twice = {name for name in self.names if self.names.count(name) > 1}
        if twice or not self.genes:
            raise UserError(f"a genome needs genes, each name once{': ' + ', '.join(sorted(twice)) if twice else ''}")
        self.low = torch.tensor([gene.low for gene in self.genes], dtype=torch.float64)
        self.high = torch.tensor([gene.high for gene in self.genes], dtype=torch.float64)
        self.is_whole = torch.tensor([gene.is_whole for gene in self.genes])
        self.is_choice = torch.tensor([isinstance(gene, ChoiceGene) for gene in self.genes])
        # In a crossover a group travels together; a gene without one travels alone.
        travellers = [gene.group or number for number, gene in enumerate(self.genes)]
        numbers = {traveller: number for number, traveller in enumerate(dict.fromkeys(travellers))}
        self.num_travellers = len(numbers)
        self.traveller_of_gene = torch.tensor([numbers[traveller] for traveller in travellers])

    def __len__(self) -> int:
        return len(self.genes)

    def repair(self, population: Tensor) -> Tensor:
        """The same inside the bounds, whole where genes are whole; every number then has one way to be written."""
        rounded = torch.where(self.is_whole, population.round(), population)
        return torch.minimum(torch.maximum(rounded, self.low), self.high) + 0.0  # −0 becomes 0

    def fits(self, population: Tensor) -> bool:
        """Has it a column for each gene, and is it in order?"""
        return population.shape[1:] == (len(self),) and torch.equal(self.repair(population), population)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """So many designs, each gene drawn evenly over what it can be."""
        return self.spread(torch.rand(count, len(self), generator=generator, dtype=torch.float64))

    def spread(self, drawn: Tensor) -> Tensor:
        """Numbers from 0 to 1, drawn evenly, over what each gene can be."""
        # A whole number's stretch reaches half a unit over its bounds, so that all are equally likely.
        margin = self.is_whole * (0.5 - 1e-9)
        return self.repair(self.low - margin + drawn * (self.high - self.low + 2 * margin))

    def to_unit(self, population: Tensor) -> Tensor:
        """Every gene from 0 to 1 over its bounds: what networks see."""
        return (population - self.low) / self._range

    def from_unit(self, unit: Tensor) -> Tensor:
        return self.repair(self.low + unit * (self.high - self.low))

    def design(self, row: Tensor) -> dict[str, Any]:
        """A row of a population, by the genes' names."""
        return {gene.name: gene.read(value) for gene, value in zip(self.genes, row.tolist(), strict=True)}

    def row(self, design: Mapping[str, Any]) -> Tensor:
        """The other way round. All genes must be given; a value outside its bounds is an error."""
        require_known("the genome has no gene", design, self.names)
        if missing := [name for name in self.names if name not in design]:
            raise UserError(f"the design has no {', '.join(missing)}")
        return torch.tensor([gene.write(design[gene.name]) for gene in self.genes], dtype=torch.float64)

    def keys(self, population: Tensor) -> list[bytes]:
        """What tells designs apart: equal keys, equal designs."""
        rows = self.repair(population).contiguous()
        width, data = rows.element_size() * len(self), rows.numpy().tobytes()
        return [data[start : start + width] for start in range(0, len(data), width)]

    @property
    def _range(self) -> Tensor:
        """Of a gene that is fixed, 1: it is at 0 of it."""
        return torch.where(self.high > self.low, self.high - self.low, 1.0)
