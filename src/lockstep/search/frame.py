"""How the guidance network sees designs: from the middle of the good ones, in units of how far these lie apart.

A search narrows down, so what matters is ever smaller beside the genes' bounds; seen through a frame it keeps its size.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor

from lockstep.search.genome import Genome

_FINEST = 1e-6  # share of a gene's range under which differences are not told apart
_FARTHEST = 8.0  # what lies farther out, a design that failed perhaps, is seen there


class Frame:
    """`centre` and `scale` are of the genes that are numbers, over their ranges; choices are a column an option."""

    def __init__(self, genome: Genome, centre: Tensor, scale: Tensor) -> None:
        self.genome = genome
        self.centre = centre
        self.scale = scale
        self.numbers = (~genome.is_choice).nonzero()[:, 0]
        self.choices = [int(gene) for gene in genome.is_choice.nonzero()[:, 0]]
        self.option_sizes = [int(genome.high[gene]) + 1 for gene in self.choices]
        pairs = [(gene, option) for gene in self.choices for option in range(int(genome.high[gene]) + 1)]
        self._gene_of_option, self._number_of_option = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)

    @classmethod
    def around(cls, genome: Genome, designs: Tensor) -> Self:
        """Made for these designs, one at least."""
        numbers = ~genome.is_choice
        unit = genome.to_unit(designs)[:, numbers]
        # A whole number must be seen to move by one.
        step = torch.where(genome.is_whole, 0.5 / (genome.high - genome.low).clamp(min=1.0), _FINEST)[numbers]
        centre = unit.mean(0)
        return cls(genome, centre, torch.maximum((unit - centre).square().mean(0).sqrt(), step))

    @classmethod
    def from_state(cls, genome: Genome, state: Mapping[str, Any]) -> Self:
        return cls(genome, state["centre"], state["scale"])

    def state_dict(self) -> dict[str, Tensor]:
        return {"centre": self.centre, "scale": self.scale}

    def numbers_of(self, designs: Tensor) -> Tensor:
        return (self.genome.to_unit(designs)[:, self.numbers] - self.centre) / self.scale

    def options_of(self, designs: Tensor) -> Tensor:
        return (designs[:, self._gene_of_option] == self._number_of_option).double()

    def features(self, designs: Tensor) -> Tensor:
        """What the network is given, a row a design: numbers, then options."""
        numbers = self.numbers_of(designs).clamp(-_FARTHEST, _FARTHEST)
        return torch.cat([numbers, self.options_of(designs)], 1).float()

    def designs(self, numbers: Tensor, chosen: Tensor) -> Tensor:
        """The other way round: numbers as seen here, and a column for each choice with the option's number."""
        unit = self.centre + numbers * self.scale
        low, high = self.genome.low[self.numbers], self.genome.high[self.numbers]
        designs = torch.empty(len(numbers), len(self.genome), dtype=torch.float64)
        designs[:, self.numbers] = low + unit * (high - low)
        designs[:, self.choices] = chosen
        return self.genome.repair(designs)
