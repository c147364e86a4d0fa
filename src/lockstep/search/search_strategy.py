"""The interface of a search strategy: ask for designs, tell it their costs. `Evolution` is the built-in one."""

from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.search.genome import Genome


class SearchStrategy(Protocol):
    """Proposes designs. It learns only through `tell`, and its random draws depend only on the seed and the generation.

    Costs are float64 with one row per design and one column per objective; smaller is better, inf marks a failure.
    """

    @property
    def population(self) -> Tensor:
        """The designs that the next ones come from; empty before the first `tell`."""
        ...

    @property
    def costs(self) -> Tensor:
        """The costs of `population`."""
        ...

    def ask(self, count: int, generation: int) -> Tensor:
        """Return `count` new designs that `Genome.repair` leaves unchanged. Called once per `generation`, from 0."""
        ...

    def tell(self, designs: Tensor, costs: Tensor) -> None:
        """Learn the `costs` of evaluated `designs`: those that were asked for, fewer of them, or others too."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what `tell` has changed, for checkpoints."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore what `state_dict` returned."""
        ...


def ask_for_designs(strategy: SearchStrategy, genome: Genome, count: int, generation: int) -> Tensor:
    """Ask the strategy, which may be user code, and check the shape and the bounds of what it returns."""
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
