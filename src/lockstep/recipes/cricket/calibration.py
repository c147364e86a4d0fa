"""Calibration metrics and reliability diagrams: do outcomes given a probability of 30 % occur 30 % of the time?"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.metrics.accumulators import MergedAccumulator
from lockstep.metrics.averages import exact_ratio
from lockstep.recipes.cricket.match import NUM_OUTCOMES, OUTCOMES

NUM_BINS = 40  # of equal width, from 0 to 1

_MIN_BALLS = 100  # that a bin needs to be drawn as a point
_RESOLUTION = 80  # dots per inch


@dataclass(frozen=True, eq=False)
class Reliability:
    """For each outcome and each bin of probabilities: number of balls, sum of probabilities, number of occurrences."""

    probabilities: Tensor  # (balls, outcomes)
    outcomes: Tensor  # (balls)

    def value(self, device: torch.device) -> Tensor:
        probabilities = self.probabilities.to(device, torch.float64)
        bins = (probabilities * NUM_BINS).long().clamp_(0, NUM_BINS - 1)
        cells = (bins + NUM_BINS * torch.arange(NUM_OUTCOMES, device=device)).reshape(-1)
        occurred = torch.nn.functional.one_hot(self.outcomes.to(device), NUM_OUTCOMES).double()
        columns = [torch.ones_like(probabilities), probabilities, occurred]
        empty = torch.zeros(NUM_OUTCOMES * NUM_BINS, dtype=torch.float64, device=device)
        sums = [empty.scatter_add(0, cells, column.reshape(-1)) for column in columns]
        return torch.stack(sums, dim=1).reshape(NUM_OUTCOMES, NUM_BINS, 3)

    def accumulator(self) -> MergedAccumulator:
        return MergedAccumulator()

    def result(self, collected: Tensor) -> Any:
        return collected


class CalibrationError(Reliability):
    """The expected calibration error: over bins weighted by their balls, averaged over outcomes."""

    def result(self, collected: Tensor) -> float:
        counts, probabilities, occurred = collected.unbind(2)
        return float(((probabilities - occurred).abs().sum(1) / counts.sum(1)).mean())


@dataclass(frozen=True, eq=False)
class LossByOutcome:
    """The mean loss of the balls of each outcome, in the order of `OUTCOMES`; NaN if there are none."""

    losses: Tensor  # (balls)
    outcomes: Tensor  # (balls)

    def value(self, device: torch.device) -> Tensor:
        occurred = torch.nn.functional.one_hot(self.outcomes.to(device), NUM_OUTCOMES).double()
        return torch.stack([self.losses.to(device, torch.float64) @ occurred, occurred.sum(0)])

    def accumulator(self) -> MergedAccumulator:
        return MergedAccumulator()

    def result(self, collected: Tensor) -> list[float]:
        return [exact_ratio(*pair) for pair in collected.T.tolist()]


def draw_calibration(curves: Sequence[tuple[str, Sequence[Any]]]) -> Tensor:
    """Draw reliability diagrams, one per outcome, with a curve per (name, reliability): bytes, height × width × 3."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(11, 5.4), dpi=_RESOLUTION, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        plots = figure.subplots(2, 4).ravel()
        for outcome, plot in zip(range(NUM_OUTCOMES), plots, strict=False):
            for name, cells in curves:
                _draw_curve(plot, name, np.asarray(cells)[outcome])
            plot.set_title(OUTCOMES[outcome])
            plot.set(xlabel="predicted probability", ylabel="observed frequency")
        plots[-1].axis("off")
        plots[-1].legend(*plots[0].get_legend_handles_labels(), loc="center", frameon=False)
        buffer = BytesIO()
        canvas.print_rgba(buffer)  # type: ignore[no-untyped-call]
        width, height = canvas.get_width_height()
    pixels = np.frombuffer(buffer.getvalue(), np.uint8).reshape(height, width, 4)
    return torch.from_numpy(pixels[:, :, :3].copy())


def _draw_curve(axes: Any, name: str, cells: NDArray[np.float64]) -> None:
    shown = cells[cells[:, 0] >= min(_MIN_BALLS, cells[:, 0].max())]
    probabilities, shares = shown[:, 1] / shown[:, 0], shown[:, 2] / shown[:, 0]
    axes.plot(probabilities, shares, marker="o", markersize=3, linewidth=1, label=name)
    axes.axline((0, 0), slope=1, color="grey", linewidth=0.5)
    limit = max(axes.get_xlim()[1], axes.get_ylim()[1], float(probabilities.max()), float(shares.max()))
    axes.set(xlim=(0, limit), ylim=(0, limit))
