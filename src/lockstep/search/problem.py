"""What is searched for: a genome, what is to be made small or large, and how designs are evaluated."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.search.genome import Genome


@dataclass(frozen=True)
class Objective:
    name: str
    direction: Literal["min", "max"] = "min"
    unit: str = ""

    def __post_init__(self) -> None:
        if self.direction not in ("min", "max"):
            raise UserError(f"objective {self.name}: direction={self.direction!r}: expected 'min' or 'max'")


class Evaluation(NamedTuple):
    """Of one design: its objectives' values, or why there are none."""

    values: tuple[float, ...] = ()
    failure: str | None = None

    def as_json(self) -> "str | list[float]":
        return list(self.values) if self.failure is None else self.failure

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """What `as_json` cannot have made is a ValueError."""
        if isinstance(value, str):
            return cls(failure=value)
        if isinstance(value, list) and all(isinstance(each, float) for each in value):
            return cls(tuple(value))
        raise ValueError(f"not an evaluation: {value!r}")


class Evaluator(Protocol):
    """How designs are evaluated. All that it goes by is what it is given, so that any rank may evaluate any design."""

    @property
    def batch(self) -> int:
        """Designs that are evaluated at a time: part of the numerics, since it can change a sum's last bits."""
        ...

    def evaluate(self, genome: Genome, designs: Tensor, keys: Sequence[int]) -> list[Evaluation]:
        """`keys`: for each design a number, drawn from the seed, its generation and its place there."""
        ...


@dataclass(frozen=True)
class Problem:
    genome: Genome
    objectives: tuple[Objective, ...]
    evaluator: Evaluator

    def __post_init__(self) -> None:
        object.__setattr__(self, "objectives", tuple(self.objectives))
        if wrong := [each for each in self.objectives if not isinstance(each, Objective)]:
            raise UserError(f"objectives: expected Objective(name, 'min' or 'max') for each, got {wrong[0]!r}")
        if not (hasattr(self.evaluator, "evaluate") and hasattr(self.evaluator, "batch")):
            raise UserError(
                f"evaluator: expected OneByOne(function), Together(function) or Program(…), got {self.evaluator!r}"
            )
        names = [each.name for each in self.objectives]
        if not names or len(set(names)) < len(names):
            raise UserError(f"a problem needs one objective or more, each name once, got {', '.join(names) or 'none'}")
        values = list(getattr(self.evaluator, "names", ())) or names
        if len(values) != len(names) or (values != names and sorted(values) == sorted(names)):
            raise UserError(
                f"names={tuple(values)}: expected one for each objective, in their order: {', '.join(names)}"
            )

    def described(self) -> dict[str, Any]:
        """What its evaluations hang on, as plain values: but for the function or program itself."""
        genes = {f"gene {gene.name}": {"kind": type(gene).__name__, **asdict(gene)} for gene in self.genome.genes}
        return {"genes": self.genome.names, **genes, "objectives": self.directions, "batch": self.evaluator.batch}

    @property
    def directions(self) -> dict[str, str]:
        return {each.name: each.direction for each in self.objectives}

    @property
    def signs(self) -> Tensor:
        """What an objective's value is multiplied with to be a cost, and a cost to be its value."""
        return torch.tensor([1.0 if each.direction == "min" else -1.0 for each in self.objectives], dtype=torch.float64)
