"""Metrics of predicted classes, all from one table of whole numbers: who was taken for whom, how often."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.metrics.average import exact_sum, ratio
from lockstep.metrics.keepers import Merged

_MANY_CLASSES = 30_000  # their table would take gigabytes


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """Counts as nested lists: row = the sample's class, column = the predicted one. Classes are 0 … num_classes − 1."""

    predicted: Tensor
    target: Tensor
    num_classes: int

    def __post_init__(self) -> None:
        if self.predicted.shape != self.target.shape:
            raise UserError(
                f"predicted classes of shape {tuple(self.predicted.shape)}, "
                f"true ones of shape {tuple(self.target.shape)}: give one class a sample, as scores.argmax(1) does"
            )
        if self.predicted.is_floating_point() or self.target.is_floating_point():
            raise UserError("classes are whole numbers, not floats: give scores.argmax(1), or (scores > 0).long()")
        if not 1 <= self.num_classes <= _MANY_CLASSES:
            raise UserError(f"num_classes={self.num_classes}: expected 1 to {_MANY_CLASSES:,}")

    def value(self, device: torch.device) -> Tensor:
        """The table in one line, and at its end how many samples have a class that is none."""
        predicted, target = (classes.to(device).reshape(-1).long() for classes in (self.predicted, self.target))
        size = self.num_classes
        # A wrong class is counted, not looked for: looking would wait for the device.
        is_known = (predicted >= 0) & (predicted < size) & (target >= 0) & (target < size)
        cell = torch.where(is_known, target * size + predicted, size * size)
        counts = torch.zeros(size * size + 1, dtype=torch.int64, device=device)
        return counts.scatter_add_(0, cell, torch.ones_like(cell))

    def keeper(self) -> Merged:
        return Merged()

    def table(self, kept: Tensor) -> list[list[int]]:
        if kept[-1]:
            raise UserError(
                f"{int(kept[-1])} samples have a class or a prediction outside 0 … {self.num_classes - 1}: "
                "leave them out, or say num_classes= as it is"
            )
        table: list[list[int]] = kept[:-1].reshape(self.num_classes, self.num_classes).tolist()
        return table

    def result(self, kept: Tensor) -> list[list[int]] | list[float] | float:
        return self.table(kept)


class Accuracy(ConfusionMatrix):
    """The share of samples whose class was predicted."""

    def result(self, kept: Tensor) -> float:
        table = self.table(kept)
        return ratio(sum(table[index][index] for index in range(self.num_classes)), sum(map(sum, table)))


class ClassCounts(NamedTuple):
    hits: int
    predicted: int  # how often the class was predicted
    actual: int  # how often it was there


@dataclass(frozen=True, eq=False)
class _PerClass(ConfusionMatrix, ABC):
    """A score of each class; their plain mean, unless `per_class` asks for all of them.

    A class that is neither there nor predicted has no score (not a number) and no part in the mean.
    """

    per_class: bool = False

    @abstractmethod
    def score(self, counts: ClassCounts) -> float: ...

    def result(self, kept: Tensor) -> list[float] | float:
        table = self.table(kept)
        counts = [
            ClassCounts(table[index][index], sum(row[index] for row in table), sum(table[index]))
            for index in range(self.num_classes)
        ]
        if self.per_class:
            return [self.score(each) if each.predicted + each.actual else float("nan") for each in counts]
        scores = [self.score(each) for each in counts if each.predicted + each.actual]
        return ratio(exact_sum(scores), len(scores))


class Precision(_PerClass):
    """Of those predicted to be of a class, the share that is; 0 where none was predicted."""

    def score(self, counts: ClassCounts) -> float:
        return counts.hits / counts.predicted if counts.predicted else 0.0


class Recall(_PerClass):
    """Of those of a class, the share that was predicted so; 0 where there are none."""

    def score(self, counts: ClassCounts) -> float:
        return counts.hits / counts.actual if counts.actual else 0.0


class F1(_PerClass):
    """The harmonic mean of precision and recall."""

    def score(self, counts: ClassCounts) -> float:
        return 2 * counts.hits / (counts.predicted + counts.actual)
