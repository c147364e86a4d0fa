"""The models to beat: how often each outcome came in the training matches, over all and for each state of the table.

The table model knows stage (first innings, later innings, super over), over and wickets lost. The counts of a cell are
smoothed towards the base rate: as if `smoothing` further balls with the base rate's outcomes had been seen in it. The
smoothing is the one that is best for the table on a part of the training matches.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.recipes.cricket.match import NUM_OUTCOMES
from lockstep.recipes.cricket.state import NUM_CELLS

_SMOOTHINGS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
_LEAST_BALLS = 1.0  # of an outcome in all: what was never seen is not impossible


class Balls(NamedTuple):
    """Of some matches, one after another."""

    cells: NDArray[np.int64]
    outcomes: NDArray[np.int64]


class Table(NamedTuple):
    base: NDArray[np.float64]  # (outcomes): shares
    chances: NDArray[np.float64]  # (cells, outcomes)
    smoothing: float


def fit(balls: Balls, check: Balls, rest: Balls) -> Table:
    """The table of all the balls; its smoothing is what does best for the table of `rest` on `check`."""
    counts, base = _counts(rest), base_rate(rest)
    losses = [log_loss(_smoothed(counts, base, each), check) for each in _SMOOTHINGS]
    smoothing = _SMOOTHINGS[int(np.argmin(losses))]
    return Table(base_rate(balls), _smoothed(_counts(balls), base_rate(balls), smoothing), smoothing)


def base_rate(balls: Balls) -> NDArray[np.float64]:
    counts = np.bincount(balls.outcomes, minlength=NUM_OUTCOMES) + _LEAST_BALLS / NUM_OUTCOMES
    return np.asarray(counts / counts.sum())


def log_loss(chances: NDArray[np.float64], balls: Balls) -> float:
    return float(-np.log(chances[balls.cells, balls.outcomes]).mean())


def _counts(balls: Balls) -> NDArray[np.float64]:
    flat = np.bincount(balls.cells * NUM_OUTCOMES + balls.outcomes, minlength=NUM_CELLS * NUM_OUTCOMES)
    return flat.reshape(NUM_CELLS, NUM_OUTCOMES).astype(np.float64)


def _smoothed(counts: NDArray[np.float64], base: NDArray[np.float64], smoothing: float) -> NDArray[np.float64]:
    return np.asarray((counts + smoothing * base) / (counts.sum(1, keepdims=True) + smoothing))
