"""Ask and tell: what a search needs of whoever thinks up designs. `evolution.py` has the one that is built in."""

from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.search.genome import Genome


class Strategy(Protocol):
    """All it knows comes through `tell`, and all that it draws depends on the seed and the generation alone.

    Costs are float64, a row a design and a column an objective; smaller is better, and inf is a design that failed.
    """

    @property
    def population(self) -> Tensor:
        """The designs it would breed from now; none before the first `tell`."""
        ...

    @property
    def costs(self) -> Tensor:
        """Theirs."""
        ...

    def ask(self, count: int, generation: int) -> Tensor:
        """So many new designs, in order as `Genome.repair` says. Any count may be asked for, once a generation."""
        ...

    def tell(self, designs: Tensor, costs: Tensor) -> None:
        """What was evaluated in a generation: those that were asked for, fewer of them, or others besides."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


def ask(strategy: Strategy, genome: Genome, count: int, generation: int) -> Tensor:
    """Its designs, if they are so many and in order. It may be somebody else's, and go wrong without a word."""
    asked = f"{type(strategy).__name__}.ask({count}, {generation})"
    designs, shape = strategy.ask(count, generation), (count, len(genome))
    if not isinstance(designs, Tensor) or designs.shape != shape:
        got = f"one of shape {tuple(designs.shape)}" if isinstance(designs, Tensor) else type(designs).__name__
        raise UserError(f"{asked}: expected a tensor of shape {shape}, got {got}")
    designs = designs.to("cpu", torch.float64)
    is_wrong = (genome.repair(designs) != designs).any(0).tolist()  # also where it is NaN
    if wrong := [name for name, is_so in zip(genome.names, is_wrong, strict=True) if is_so]:
        raise UserError(f"{asked}: {', '.join(wrong)} out of bounds or not whole: return genome.repair(designs)")
    return designs
