"""Regression metrics: MSE, RMSE and R²; differences and squares are computed in fp64."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.metrics.accumulators import RowAccumulator
from lockstep.metrics.averages import column_sums, exact_ratio, exact_sum, fp64_row


@dataclass(frozen=True, eq=False)
class MeanSquaredError:
    """The mean squared error over every element of every target.

    Args:
        predicted: the predictions.
        target: the targets, of the same shape.
    """

    predicted: Tensor
    target: Tensor

    def __post_init__(self) -> None:
        _check_shapes(self.predicted, self.target)

    def value(self, device: torch.device) -> Tensor:
        """This chunk's value for the accumulator."""
        error = self.predicted.double() - self.target.double()
        return fp64_row(device, (error * error).sum(), error.numel())

    def accumulator(self) -> RowAccumulator:
        """A new, empty accumulator."""
        return RowAccumulator()

    def result(self, collected: Tensor) -> float:
        """The metric over all samples."""
        sum_, count = column_sums(collected)
        return exact_ratio(sum_, count)


class RootMeanSquaredError(MeanSquaredError):
    """The square root of the mean squared error over all samples, not the mean of the batches' roots.

    Args:
        predicted: the predictions.
        target: the targets, of the same shape.
    """

    def result(self, collected: Tensor) -> float:
        """The metric over all samples."""
        return math.sqrt(super().result(collected))


@dataclass(frozen=True, eq=False)
class R2Score:
    """1 − (squared errors / squared deviations of the targets from their mean); the mean over several outputs.

    NaN if the targets do not vary.

    Args:
        predicted: the predictions, of shape (samples, …): all dimensions but the first are outputs.
        target: the targets, of the same shape.
    """

    predicted: Tensor
    target: Tensor

    def __post_init__(self) -> None:
        _check_shapes(self.predicted, self.target)

    def value(self, device: torch.device) -> Tensor:
        """Per output: the count, an origin, the mean relative to it, squared deviations from that, squared errors."""
        target = _as_table(self.target, device)
        error = _as_table(self.predicted, device) - target
        if not len(target):
            return target.new_zeros(5, target.shape[1])
        # The first sample is the origin: a large offset then costs no precision, and equal targets deviate by 0.
        origin = target[0]
        mean = (target - origin).mean(0)
        deviation = target - origin - mean
        count = torch.full_like(origin, len(target))
        return torch.stack([count, origin, mean, (deviation * deviation).sum(0), (error * error).sum(0)])

    def accumulator(self) -> RowAccumulator:
        """A new, empty accumulator."""
        return RowAccumulator()

    def result(self, collected: Tensor) -> float:
        """The metric over all samples; `collected` is of shape (chunks, 5, outputs)."""
        scores = [_r2(collected[:, :, output].tolist()) for output in range(collected.shape[2])]
        return exact_ratio(exact_sum(scores), len(scores))


def _r2(chunks: list[list[float]]) -> float:
    """One output's score: chunk by chunk, the deviations are shifted to the common mean and added."""
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
    return 1.0 - exact_ratio(errors, deviations)


def _as_table(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor in fp64, of shape (samples, outputs)."""
    num_samples = len(tensor) if tensor.dim() else 1
    return tensor.detach().to(device, torch.float64).reshape(num_samples, math.prod(tensor.shape[1:]))


def _check_shapes(predicted: Tensor, target: Tensor) -> None:
    if predicted.shape != target.shape:
        # Subtracting shapes (n, 1) and (n,) would broadcast to n × n differences.
        raise UserError(
            f"predictions of shape {tuple(predicted.shape)}, targets of shape {tuple(target.shape)}: "
            "give both the same shape"
        )
