"""Metrics of predicted numbers. Differences and squares are taken in fp64, whatever the model computes in."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.metrics.average import column_sums, exact_sum, ratio, row
from lockstep.metrics.keepers import Rows


@dataclass(frozen=True, eq=False)
class MeanSquaredError:
    """Over every element of every target."""

    predicted: Tensor
    target: Tensor

    def __post_init__(self) -> None:
        _check_shapes(self.predicted, self.target)

    def value(self, device: torch.device) -> Tensor:
        error = self.predicted.double() - self.target.double()
        return row(device, (error * error).sum(), error.numel())

    def keeper(self) -> Rows:
        return Rows()

    def result(self, kept: Tensor) -> float:
        sum_, count = column_sums(kept)
        return ratio(sum_, count)


class RootMeanSquaredError(MeanSquaredError):
    """The root of the mean over all samples, which is not the mean of the batches' roots."""

    def result(self, kept: Tensor) -> float:
        return math.sqrt(super().result(kept))


@dataclass(frozen=True, eq=False)
class R2Score:
    """1 − (squared errors / squared deviations of the targets from their mean); of several outputs, the mean.

    No number where the targets do not vary. Targets of shape (samples, …): all but the first are outputs.
    """

    predicted: Tensor
    target: Tensor

    def __post_init__(self) -> None:
        _check_shapes(self.predicted, self.target)

    def value(self, device: torch.device) -> Tensor:
        """A row each of the count, the outputs' means, their squared deviations from them, and the squared errors."""
        target = _as_table(self.target, device)
        error = _as_table(self.predicted, device) - target
        if not len(target):
            return target.new_zeros(4, target.shape[1])
        # Measured from the first sample: a large offset then costs no digits, and equal targets deviate by zero.
        shifted = target - target[0]
        mean = shifted.mean(0)
        deviation = shifted - mean
        count = torch.full_like(mean, len(target))
        return torch.stack([count, target[0] + mean, (deviation * deviation).sum(0), (error * error).sum(0)])

    def keeper(self) -> Rows:
        return Rows()

    def result(self, kept: Tensor) -> float:
        """`kept` is of shape (chunks, 4, outputs)."""
        scores = [_r2(kept[:, :, output].tolist()) for output in range(kept.shape[2])]
        return ratio(exact_sum(scores), len(scores))


def _r2(chunks: list[list[float]]) -> float:
    """One output's score: deviations are merged chunk by chunk, each time moved to the common mean."""
    count, mean, deviations = 0.0, 0.0, 0.0
    for chunk_count, chunk_mean, chunk_deviations, _ in chunks:
        if not chunk_count:
            continue
        before, count = count, count + chunk_count
        distance = chunk_mean - mean if before else 0.0
        mean = mean + distance * (chunk_count / count) if before else chunk_mean
        deviations += chunk_deviations + distance * distance * (before * chunk_count / count)
    return 1.0 - ratio(exact_sum(errors for *_, errors in chunks), deviations)


def _as_table(tensor: Tensor, device: torch.device) -> Tensor:
    """Of shape (samples, outputs), in fp64."""
    num_samples = len(tensor) if tensor.dim() else 1
    return tensor.detach().to(device, torch.float64).reshape(num_samples, math.prod(tensor.shape[1:]))


def _check_shapes(predicted: Tensor, target: Tensor) -> None:
    if predicted.shape != target.shape:
        # Subtracted as they are, (n, 1) and (n,) would make a table of n × n differences.
        raise UserError(
            f"predictions of shape {tuple(predicted.shape)}, targets of shape {tuple(target.shape)}: make them alike"
        )
