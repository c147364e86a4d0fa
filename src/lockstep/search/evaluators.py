"""The ways to evaluate designs by a function: many at a time, or one by one. `program.py` has another.

What goes wrong with a design is its failure, and no error of the search: it is recorded, and others go on. Before each
evaluation torch's, numpy's and Python's streams begin at the design's key, so that a noisy one can be repeated.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.arguments import require_count
from lockstep.search.genome import Genome
from lockstep.search.problem import Evaluation
from lockstep.world.randomness import seed_streams

_MAX_REASON = 200  # characters


@dataclass(frozen=True)
class Together:
    """A function of a table of designs, a row each: it returns a row of values for each. NaN is a failure.

    `batch` rows at a time, which belongs to the numerics.
    """

    function: Callable[[Tensor], Tensor]
    batch: int = 256

    def __post_init__(self) -> None:
        require_count("batch", self.batch)

    def evaluate(self, genome: Genome, designs: Tensor, keys: Sequence[int]) -> list[Evaluation]:
        try:
            return self._values(designs, keys)
        except Exception as error:
            if len(designs) == 1:
                return [failed(error)]
            # One of them has spoilt it for all: each for itself.
            return [
                evaluation
                for row, key in zip(designs, keys, strict=True)
                for evaluation in self.evaluate(genome, row[None], [key])
            ]

    def _values(self, designs: Tensor, keys: Sequence[int]) -> list[Evaluation]:
        seed_streams(keys[0])
        values = self.function(designs.clone())
        if not isinstance(values, Tensor) or values.ndim not in (1, 2) or len(values) != len(designs):
            raise ValueError(f"expected a tensor with {len(designs)} rows of values, got {_kind(values)}")
        rows = values.detach().to("cpu", torch.float64).reshape(len(designs), -1)
        return [Evaluation(tuple(row)) for row in rows.tolist()]


@dataclass(frozen=True)
class OneByOne:
    """A function of one design, by its genes' names: it returns a value, several, or several by name."""

    function: Callable[[dict[str, Any]], Any]
    names: tuple[str, ...] = ()  # of the values, where it returns them by name

    batch: int = field(default=1, init=False)

    def evaluate(self, genome: Genome, designs: Tensor, keys: Sequence[int]) -> list[Evaluation]:
        return [self._evaluate(genome.design(row), key) for row, key in zip(designs, keys, strict=True)]

    def _evaluate(self, design: dict[str, Any], key: int) -> Evaluation:
        seed_streams(key)
        try:
            return Evaluation(numbers_in(self.function(design), self.names))
        except Exception as error:
            return failed(error)


def failed(error: Exception) -> Evaluation:
    """Its reason in one line, which any terminal can show."""
    try:
        text = " ".join(str(error).split()).encode(errors="backslashreplace").decode()
    except Exception:  # an error of somebody's own may not even be able to say what it is
        text = ""
    return Evaluation(failure=f"{type(error).__name__}: {text}"[:_MAX_REASON] if text else type(error).__name__)


def numbers_in(answer: Any, names: Sequence[str]) -> tuple[float, ...]:
    """What a function or program has answered, as its objectives' values."""
    if isinstance(answer, Mapping):
        if not names:
            raise ValueError("values by name, and the evaluator was given no names=")
        if missing := [name for name in names if name not in answer]:
            raise ValueError(f"no value for {', '.join(missing)}")
        answer = [answer[name] for name in names]
    if isinstance(answer, Tensor | np.ndarray):
        answer = answer.tolist()
    values = answer if isinstance(answer, list | tuple) else [answer]
    if text := next((value for value in values if isinstance(value, str | bytes)), None):
        raise ValueError(f"expected numbers, got the text {text!r}")
    return tuple(float(value) for value in values)


def _kind(value: Any) -> str:
    return f"one of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
