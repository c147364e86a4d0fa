"""The problem of a search: a genome, the objectives to minimize or maximize, and an evaluator of designs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.search.genome import Genome


@dataclass(frozen=True)
class Objective:
    """A value to minimize or maximize, as in `Objective("drag", "min", unit="N")`.

    Args:
        name: the objective's name, unique in its problem.
        direction: `min` or `max`.
        unit: the unit of the values, for display.
    """

    name: str
    direction: Literal["min", "max"] = "min"
    unit: str = ""

    def __post_init__(self) -> None:
        if self.direction not in ("min", "max"):
            raise UserError(f"objective {self.name}: direction={self.direction!r}: expected 'min' or 'max'")


class Evaluation(NamedTuple):
    """The result for one design.

    Args:
        values: the values of its objectives, in their order.
        failure: why the evaluation failed. None: it did not.
    """

    values: tuple[float, ...] = ()
    failure: str | None = None

    def as_json(self) -> "str | list[float]":
        """Return the values as a list, or the reason of the failure."""
        return list(self.values) if self.failure is None else self.failure

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Undo `as_json`; anything else is a `UserError`."""
        if isinstance(value, str):
            return cls(failure=value)
        if isinstance(value, list) and all(isinstance(each, float) for each in value):
            return cls(tuple(value))
        raise UserError(f"not an evaluation: {value!r}")


class Evaluator(Protocol):
    """Evaluates designs. The result must depend on the arguments alone, so that any rank may evaluate any design."""

    @property
    def batch(self) -> int:
        """Designs per call: part of the numerics, since it can change the last bits of a sum."""
        ...

    def evaluate(self, genome: Genome, designs: Tensor, keys: Sequence[int]) -> list[Evaluation]:
        """Return an evaluation for each design.

        Args:
            genome: the genes; `genome.design(row)` gives the values by name.
            designs: a row for each design.
            keys: a random key for each design, made of the seed, its generation and its row there.
        """
        ...


@dataclass(frozen=True)
class Problem:
    """What a search optimizes.

    Args:
        genome: the genes of a design.
        objectives: what to minimize or maximize, in the order of the evaluator's values.
        evaluator: a `ScalarEvaluator`, `VectorizedEvaluator`, `ProgramEvaluator` or your own `Evaluator`.
    """

    genome: Genome
    objectives: tuple[Objective, ...]
    evaluator: Evaluator

    def __post_init__(self) -> None:
        object.__setattr__(self, "objectives", tuple(self.objectives))
        if wrong := [each for each in self.objectives if not isinstance(each, Objective)]:
            raise UserError(f"objectives: expected Objective(name, 'min' or 'max') for each, got {wrong[0]!r}")
        if not (hasattr(self.evaluator, "evaluate") and hasattr(self.evaluator, "batch")):
            raise UserError(
                "evaluator: expected ScalarEvaluator(function), VectorizedEvaluator(function) or ProgramEvaluator(…), "
                f"got {self.evaluator!r}"
            )
        names = [each.name for each in self.objectives]
        if not names or len(set(names)) < len(names):
            got = ", ".join(names) or "none"
            raise UserError(f"objectives: expected one or more with unique names, got {got}")
        values = list(getattr(self.evaluator, "names", ())) or names
        if len(values) != len(names) or (values != names and sorted(values) == sorted(names)):
            raise UserError(
                f"names={tuple(values)}: expected one for each objective, in their order: {', '.join(names)}"
            )

    def description(self) -> dict[str, Any]:
        """What the evaluations depend on, as plain values, except for the evaluator's function or program."""
        genes = {f"gene {gene.name}": {"kind": type(gene).__name__, **asdict(gene)} for gene in self.genome.genes}
        return {"genes": self.genome.names, **genes, "objectives": self.directions, "batch": self.evaluator.batch}

    @property
    def directions(self) -> dict[str, str]:
        """`min` or `max` by objective."""
        return {each.name: each.direction for each in self.objectives}

    @property
    def signs(self) -> Tensor:
        """Factors that turn values into costs, and costs into values: 1 for min, −1 for max."""
        return torch.tensor([1.0 if each.direction == "min" else -1.0 for each in self.objectives], dtype=torch.float64)
