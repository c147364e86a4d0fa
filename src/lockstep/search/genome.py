"""The genome: named, bounded, grouped genes. A design has a value for each; a population is a table of them.

    genome = Genome([
        FloatGene("span", 1.2, 1.8, group="plan", unit="m"),
        IntegerGene("elements", 1, 3, group="plan"),
        ChoiceGene("section", ("naca", "gurney"), group="profile"),
    ])

A population is a float64 CPU tensor with a row per design and a column per gene. The column of a choice holds the index
of the option. A population is valid when `repair` changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lockstep.config.argument_checks import require_known
from lockstep.errors import UserError

_MAX_BOUND = 1e300  # twice this is still finite: the range between the bounds must not overflow


@dataclass(frozen=True)
class FloatGene:
    """A number from `low` to `high`, both included.

    Args:
        name: the gene's name, unique in its genome.
        low: the smallest value.
        high: the largest value.
        group: genes of the same group are inherited together in a crossover; a gene without a group is inherited alone.
        unit: the unit of the values, for display.
    """

    name: str
    low: float
    high: float
    group: str = field(default="", kw_only=True)
    unit: str = field(default="", kw_only=True)

    is_whole = False

    def __post_init__(self) -> None:
        bounds = (self.low, self.high)
        if not all(isinstance(bound, int | float) and not isinstance(bound, bool) for bound in bounds):
            raise UserError(f"gene {self.name}: expected numbers as bounds, got {self.low!r} … {self.high!r}")
        if not (abs(self.low) <= _MAX_BOUND and abs(self.high) <= _MAX_BOUND and self.low <= self.high):
            raise UserError(
                f"gene {self.name}: expected bounds from {-_MAX_BOUND:g} to {_MAX_BOUND:g}, the lower first, "
                f"got {self.low} … {self.high}"
            )

    def read(self, value: float) -> Any:
        """Convert a column's number to the gene's value."""
        return value

    def write(self, value: Any) -> float:
        """Convert a value to the column's number; a value out of bounds is an error."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            raise UserError(f"gene {self.name}: expected {self.expected}, got {value!r}")
        return float(value)

    @property
    def expected(self) -> str:
        """The gene's possible values, for error messages."""
        return f"a number from {self.low:g} to {self.high:g}{self.unit and ' ' + self.unit}"


@dataclass(frozen=True)
class IntegerGene(FloatGene):
    """A whole number from `low` to `high`, both included.

    Args:
        name: the gene's name, unique in its genome.
        low: the smallest value.
        high: the largest value.
        group: as for a `FloatGene`.
        unit: the unit of the values, for display.
    """

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
    """One of several options, which have no order.

    Args:
        name: the gene's name, unique in its genome.
        options: strings, numbers or booleans.
        group: as for a `FloatGene`.
    """

    name: str
    options: tuple[str | int | float | bool, ...]
    group: str = field(default="", kw_only=True)

    unit = ""
    is_whole = True
    low = 0

    def __post_init__(self) -> None:
        if isinstance(self.options, str) or not all(isinstance(each, str | int | float) for each in self.options):
            raise UserError(f"gene {self.name}: expected a tuple of strings, numbers or booleans, got {self.options!r}")
        object.__setattr__(self, "options", tuple(self.options))
        if not self.options or len(set(self.options)) < len(self.options):
            raise UserError(f"gene {self.name}: expected one or more options without duplicates, got {self.options}")

    @property
    def high(self) -> int:
        """The largest number in the gene's column: the index of the last option."""
        return len(self.options) - 1

    def read(self, value: float) -> Any:
        """Convert a column's number to the option."""
        return self.options[int(value)]

    def write(self, value: Any) -> float:
        """Convert an option to the column's number; any other value is an error."""
        if value not in self.options:
            raise UserError(f"gene {self.name}: expected {self.expected}, got {value!r}")
        return float(self.options.index(value))

    @property
    def expected(self) -> str:
        """The gene's possible values, for error messages."""
        return f"one of {', '.join(map(str, self.options))}"


Gene = FloatGene | IntegerGene | ChoiceGene


class Genome:
    """The genes of every design, in the order of a population's columns."""

    def __init__(self, genes: Sequence[Gene]) -> None:
        self.genes = tuple(genes)
        self.names = tuple(gene.name for gene in self.genes)
        repeated = sorted({name for name in self.names if self.names.count(name) > 1})
        if repeated or not self.genes:
            got = f"{', '.join(repeated)} more than once" if repeated else "none"
            raise UserError(f"genes: expected one or more with unique names, got {got}")
        self.low = torch.tensor([gene.low for gene in self.genes], dtype=torch.float64)
        self.high = torch.tensor([gene.high for gene in self.genes], dtype=torch.float64)
        self.is_whole = torch.tensor([gene.is_whole for gene in self.genes])
        self.is_choice = torch.tensor([isinstance(gene, ChoiceGene) for gene in self.genes])
        # Genes of one linkage group are inherited together; a gene without a group is a linkage group by itself.
        groups = [gene.group or number for number, gene in enumerate(self.genes)]
        numbers = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        self.num_linkage_groups = len(numbers)
        self.linkage_group_of_gene = torch.tensor([numbers[group] for group in groups])

    def __len__(self) -> int:
        return len(self.genes)

    def repair(self, population: Tensor) -> Tensor:
        """Clip to the bounds and round where genes are whole, so that equal designs have equal bits."""
        rounded = torch.where(self.is_whole, population.round(), population)
        return torch.minimum(torch.maximum(rounded, self.low), self.high) + 0.0  # −0 becomes 0

    def fits(self, population: Tensor) -> bool:
        """Whether the population has a column for each gene and is valid."""
        return population.shape[1:] == (len(self),) and torch.equal(self.repair(population), population)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw `count` designs from the generator, each gene uniformly over its values."""
        return self.spread(torch.rand(count, len(self), generator=generator, dtype=torch.float64))

    def spread(self, drawn: Tensor) -> Tensor:
        """Map uniform numbers from 0 to 1 to the values of each gene."""
        # A whole gene's interval reaches half a unit beyond its bounds, so that all values are equally likely.
        margin = self.is_whole * (0.5 - 1e-9)
        return self.repair(self.low - margin + drawn * (self.high - self.low + 2 * margin))

    def to_unit(self, population: Tensor) -> Tensor:
        """Scale every gene to 0 … 1 over its bounds."""
        return (population - self.low) / self._range

    def from_unit(self, unit: Tensor) -> Tensor:
        """Undo `to_unit`, and repair."""
        return self.repair(self.low + unit * (self.high - self.low))

    def design(self, row: Tensor) -> dict[str, Any]:
        """Convert a row of a population to a dictionary by gene name."""
        return {gene.name: gene.read(value) for gene, value in zip(self.genes, row.tolist(), strict=True)}

    def row(self, design: Mapping[str, Any]) -> Tensor:
        """Convert a dictionary with a value for every gene to a row; a value out of bounds is an error."""
        require_known("the genome has no gene", design, self.names)
        if missing := [name for name in self.names if name not in design]:
            raise UserError(f"the design has no {', '.join(missing)}: give every gene a value")
        return torch.tensor([gene.write(design[gene.name]) for gene in self.genes], dtype=torch.float64)

    def keys(self, population: Tensor) -> list[bytes]:
        """Return a key per design; designs are equal if their keys are equal."""
        rows = self.repair(population).contiguous()
        width, data = rows.element_size() * len(self), rows.numpy().tobytes()
        return [data[start : start + width] for start in range(0, len(data), width)]

    @property
    def _range(self) -> Tensor:
        """High minus low; 1 for a gene with a single value, which `to_unit` then maps to 0."""
        return torch.where(self.high > self.low, self.high - self.low, 1.0)
