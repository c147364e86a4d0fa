"""The area under the receiver operating characteristic, from all samples' scores."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.metrics.keepers import Pieces


@dataclass(frozen=True, eq=False)
class AUROC:
    """How likely a positive sample (label 1) scores above a negative one (label 0); a tie counts one half.

    Exact: pairs are counted in whole numbers, and divided once. No number if one of the two classes is missing.
    """

    scores: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.scores.numel() != self.labels.numel():
            raise UserError(
                f"scores of shape {tuple(self.scores.shape)}, labels of shape {tuple(self.labels.shape)}: "
                "give one score a sample"
            )

    def value(self, device: torch.device) -> list[Tensor]:
        return [tensor.detach().to(device).reshape(-1) for tensor in (self.scores, self.labels)]

    def keeper(self) -> Pieces:
        return Pieces()

    def result(self, kept: list[list[Tensor]]) -> float:
        scores = torch.cat([scores.double() for scores, _ in kept])
        labels = torch.cat([labels.double() for _, labels in kept])
        is_positive = labels == 1
        if not (is_positive | (labels == 0)).all():
            raise UserError("labels other than 0 and 1: give one class against the others, as (labels == 3)")
        if scores.isnan().any():
            return math.nan
        return _area(scores, is_positive)


def _area(scores: Tensor, is_positive: Tensor) -> float:
    order = scores.argsort()
    scores, is_positive = scores[order], is_positive[order]
    is_new = scores != scores.roll(1)
    is_new[:1] = True
    group = is_new.cumsum(0) - 1  # samples with equal scores are in one
    num_groups = int(is_new.sum())
    positives = group[is_positive].bincount(minlength=num_groups)
    negatives = group[~is_positive].bincount(minlength=num_groups)
    negatives_below = negatives.cumsum(0) - negatives
    twice_the_wins = int((positives * (2 * negatives_below + negatives)).sum())
    pairs = int(positives.sum()) * int(negatives.sum())
    return twice_the_wins / (2 * pairs) if pairs else math.nan
