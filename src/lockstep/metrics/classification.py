"""Classification metrics: confusion matrix, accuracy, precision, recall, F1, and AUROC.

All but AUROC come from one confusion matrix of integers, so they are exact.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.metrics.accumulators import MergedAccumulator, PieceAccumulator
from lockstep.metrics.averages import exact_ratio, exact_sum

_MAX_CLASSES = 30_000  # the confusion matrix of more would take gigabytes


@dataclass(frozen=True, eq=False)
class ConfusionMatrix:
    """Counts as nested lists: a row for each true class, a column for each predicted one.

    Args:
        predicted: the predicted class of each sample, 0 … num_classes − 1.
        target: the true class of each sample, of the same shape.
        num_classes: the number of classes.
    """

    predicted: Tensor
    target: Tensor
    num_classes: int

    def __post_init__(self) -> None:
        if self.predicted.shape != self.target.shape:
            raise UserError(
                f"predicted classes of shape {tuple(self.predicted.shape)}, "
                f"true classes of shape {tuple(self.target.shape)}: give one class per sample, such as scores.argmax(1)"
            )
        if self.predicted.is_floating_point() or self.target.is_floating_point():
            raise UserError("classes must be integers, not floats: give scores.argmax(1), or (scores > 0).long()")
        if not 1 <= self.num_classes <= _MAX_CLASSES:
            raise UserError(f"num_classes={self.num_classes}: expected 1 to {_MAX_CLASSES:,}")

    def value(self, device: torch.device) -> Tensor:
        """The flattened table, followed by the number of samples with a class outside of it."""
        predicted, target = (classes.to(device).reshape(-1).long() for classes in (self.predicted, self.target))
        size = self.num_classes
        # Samples with a wrong class are counted here and reported later: a check now would wait for the device.
        is_known = (predicted >= 0) & (predicted < size) & (target >= 0) & (target < size)
        cell = torch.where(is_known, target * size + predicted, size * size)
        counts = torch.zeros(size * size + 1, dtype=torch.int64, device=device)
        return counts.scatter_add_(0, cell, torch.ones_like(cell))

    def accumulator(self) -> MergedAccumulator:
        """A new, empty accumulator."""
        return MergedAccumulator()

    def table(self, collected: Tensor) -> list[list[int]]:
        """The confusion matrix over all samples."""
        if collected[-1]:
            raise UserError(
                f"{int(collected[-1])} samples have a class or a prediction outside 0 … {self.num_classes - 1}: "
                "omit them, or correct num_classes="
            )
        table: list[list[int]] = collected[:-1].reshape(self.num_classes, self.num_classes).tolist()
        return table

    def result(self, collected: Tensor) -> list[list[int]] | list[float] | float:
        """The metric over all samples."""
        return self.table(collected)


class Accuracy(ConfusionMatrix):
    """The fraction of samples whose class was predicted correctly.

    Args:
        predicted: the predicted class of each sample, 0 … num_classes − 1.
        target: the true class of each sample, of the same shape.
        num_classes: the number of classes.
    """

    def result(self, collected: Tensor) -> float:
        """The metric over all samples."""
        table = self.table(collected)
        return exact_ratio(sum(table[index][index] for index in range(self.num_classes)), sum(map(sum, table)))


class ClassCounts(NamedTuple):
    """The counts of one class."""

    hits: int  # samples of the class that were predicted as it
    predicted: int  # samples that were predicted as it
    actual: int  # samples of the class


@dataclass(frozen=True, eq=False)
class _PerClass(ConfusionMatrix, ABC):
    """A score of each class; the result is their unweighted mean, or with `per_class` the list of all of them.

    A class that no sample has and that was never predicted has the score NaN, and does not count in the mean.
    """

    per_class: bool = False

    @abstractmethod
    def score(self, counts: ClassCounts) -> float:
        """The score of one class."""

    def result(self, collected: Tensor) -> list[float] | float:
        """The metric over all samples."""
        table = self.table(collected)
        counts = [
            ClassCounts(table[index][index], sum(row[index] for row in table), sum(table[index]))
            for index in range(self.num_classes)
        ]
        if self.per_class:
            return [self.score(each) if each.predicted + each.actual else float("nan") for each in counts]
        scores = [self.score(each) for each in counts if each.predicted + each.actual]
        return exact_ratio(exact_sum(scores), len(scores))


class Precision(_PerClass):
    """Of the samples predicted as a class, the fraction that is of it; 0 if none was predicted. Mean over classes.

    Args:
        predicted: the predicted class of each sample, 0 … num_classes − 1.
        target: the true class of each sample, of the same shape.
        num_classes: the number of classes.
        per_class: return the list of all scores instead of their unweighted mean.
    """

    def score(self, counts: ClassCounts) -> float:
        """The score of one class."""
        return counts.hits / counts.predicted if counts.predicted else 0.0


class Recall(_PerClass):
    """Of the samples of a class, the fraction predicted as it; 0 if there are none. Mean over classes.

    Args:
        predicted: the predicted class of each sample, 0 … num_classes − 1.
        target: the true class of each sample, of the same shape.
        num_classes: the number of classes.
        per_class: return the list of all scores instead of their unweighted mean.
    """

    def score(self, counts: ClassCounts) -> float:
        """The score of one class."""
        return counts.hits / counts.actual if counts.actual else 0.0


class F1(_PerClass):
    """The harmonic mean of precision and recall. Mean over classes.

    Args:
        predicted: the predicted class of each sample, 0 … num_classes − 1.
        target: the true class of each sample, of the same shape.
        num_classes: the number of classes.
        per_class: return the list of all scores instead of their unweighted mean.
    """

    def score(self, counts: ClassCounts) -> float:
        """The score of one class."""
        return 2 * counts.hits / (counts.predicted + counts.actual)


@dataclass(frozen=True, eq=False)
class AUROC:
    """The area under the ROC curve: how often a positive sample scores above a negative one; a tie counts one half.

    Exact, because pairs are counted in integers and divided once. NaN if one of the two classes is missing.

    Args:
        scores: the score of each sample.
        labels: the label of each sample, 0 or 1.
    """

    scores: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.scores.numel() != self.labels.numel():
            raise UserError(
                f"scores of shape {tuple(self.scores.shape)}, labels of shape {tuple(self.labels.shape)}: "
                "give one score per sample"
            )

    def value(self, device: torch.device) -> list[Tensor]:
        """This chunk's value for the accumulator."""
        return [tensor.detach().to(device).reshape(-1) for tensor in (self.scores, self.labels)]

    def accumulator(self) -> PieceAccumulator:
        """A new, empty accumulator."""
        return PieceAccumulator()

    def result(self, collected: list[list[Tensor]]) -> float:
        """The metric over all samples."""
        scores = torch.cat([scores.double() for scores, _ in collected])
        labels = torch.cat([labels.double() for _, labels in collected])
        is_positive = labels == 1
        if not (is_positive | (labels == 0)).all():
            raise UserError("labels other than 0 and 1: give one class against the others, such as (labels == 3)")
        if scores.isnan().any():
            return math.nan
        return _area(scores, is_positive)


def _area(scores: Tensor, is_positive: Tensor) -> float:
    order = scores.argsort()
    scores, is_positive = scores[order], is_positive[order]
    is_new = scores != scores.roll(1)
    is_new[:1] = True
    group = is_new.cumsum(0) - 1  # samples with equal scores form one group
    num_groups = int(is_new.sum())
    positives = group[is_positive].bincount(minlength=num_groups)
    negatives = group[~is_positive].bincount(minlength=num_groups)
    negatives_below = negatives.cumsum(0) - negatives
    twice_the_wins = int((positives * (2 * negatives_below + negatives)).sum())
    pairs = int(positives.sum()) * int(negatives.sum())
    return twice_the_wins / (2 * pairs) if pairs else math.nan
