"""All that was evaluated so far: each design once, with its costs, the generation it came from, and why it failed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.search.genome import Genome


class Archive:
    """Rows are in the order in which designs were first asked for, which does not depend on who evaluated them."""

    def __init__(self, genome: Genome, num_objectives: int) -> None:
        self.genome = genome
        self.designs = torch.empty(0, len(genome), dtype=torch.float64)
        self.costs = torch.empty(0, num_objectives, dtype=torch.float64)  # inf where it failed
        self.generations = torch.empty(0, dtype=torch.int64)
        self.failures: dict[int, str] = {}  # by row, the reason
        self._rows: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self.designs)

    def find(self, designs: Tensor) -> list[int | None]:
        """For each, the row where it stands, if it was evaluated before."""
        return [self._rows.get(key) for key in self.genome.keys(designs)]

    def add(self, designs: Tensor, costs: Tensor, generation: int, failures: Mapping[int, str]) -> None:
        """New ones only, each once; `failures` by their row in `designs`."""
        first = len(self)
        self.designs = torch.cat([self.designs, self.genome.repair(designs)])
        self.costs = torch.cat([self.costs, costs])
        self.generations = torch.cat([self.generations, torch.full((len(designs),), generation)])
        self.failures |= {first + row: reason for row, reason in failures.items()}
        self._note(self.genome.keys(designs), first)

    @property
    def is_good(self) -> Tensor:
        """Which rows were evaluated without a failure."""
        return self.costs.isfinite().all(1)

    def state_dict(self) -> dict[str, Any]:
        return {
            "designs": self.designs,
            "costs": self.costs,
            "generations": self.generations,
            "failures": {str(row): reason for row, reason in self.failures.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._require_same_problem(state["designs"], state["costs"])
        self.designs, self.costs, self.generations = (state[name] for name in ("designs", "costs", "generations"))
        self.failures = {int(row): reason for row, reason in state["failures"].items()}
        self._rows = {}
        self._note(self.genome.keys(self.designs), 0)

    def _require_same_problem(self, designs: Tensor, costs: Tensor) -> None:
        """What was saved is of the same genes and objectives; bounds may only have become wider."""
        saved, expected = (designs.shape[1], costs.shape[1]), (len(self.genome), self.costs.shape[1])
        if saved != expected:
            raise UserError(
                f"the search that was saved has {saved[0]} genes and {saved[1]} objectives, and this one has "
                f"{expected[0]} and {expected[1]}: another problem needs another folder"
            )
        is_changed = (self.genome.repair(designs) != designs).any(0)
        if is_changed.any():
            names = ", ".join(self.genome.names[gene] for gene in is_changed.nonzero().flatten().tolist())
            raise UserError(
                f"the search that was saved has designs outside of what {names} can be now: give the old bounds, "
                "or choose another folder"
            )

    def _note(self, keys: Sequence[bytes], first: int) -> None:
        assert not self._rows.keys() & set(keys) and len(set(keys)) == len(keys)
        self._rows |= {key: row for row, key in enumerate(keys, first)}
