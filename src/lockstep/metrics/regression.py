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
        """For each output: the count, an origin and the mean from there, squared deviations from it, squared errors."""
        target = _as_table(self.target, device)
        error = _as_table(self.predicted, device) - target
        if not len(target):
            return target.new_zeros(5, target.shape[1])
        # The first sample is the origin: a large offset then costs no digits, and equal targets deviate by zero.
        origin = target[0]
        mean = (target - origin).mean(0)
        deviation = target - origin - mean
        count = torch.full_like(origin, len(target))
        return torch.stack([count, origin, mean, (deviation * deviation).sum(0), (error * error).sum(0)])

    def keeper(self) -> Rows:
        return Rows()

    def result(self, kept: Tensor) -> float:
        """`kept` is of shape (chunks, 5, outputs)."""
        scores = [_r2(kept[:, :, output].tolist()) for output in range(kept.shape[2])]
        return ratio(exact_sum(scores), len(scores))


def _r2(chunks: list[list[float]]) -> float:
    """One output's score: chunk by chunk, deviations are moved to the common mean and added."""
    errors = exact_sum(chunk[-1] for chunk in chunks)
    chunks = [chunk for chunk in chunks if chunk[0]]
    if not chunks:
        return math.nan
    count, origin, mean, deviations, _ = chunks[0]
    for chunk_count, chunk_origin, chunk_mean, chunk_deviations, _ in chunks[1:]:
        distance = (chunk_origin - origin) + (chunk_mean - mean)
        total = count + chunk_count
        mean += distance * (chunk_count / total)
        deviations += chunk_deviations + distance * distance * (count * chunk_count / total)
        count = total
    return 1.0 - ratio(errors, deviations)


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
