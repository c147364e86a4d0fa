"""Predict the time of a step on any number of processes, from measurements on a few.

A step on W processes takes

    data + lanes of the busiest process × seconds per lane + waiting for the slowest rank and for gradients + rest

[Note: scaling model]
- A lane takes longer when more processes share a machine's memory and cores. The slow-down measured between one process
  and two is added again with every doubling.
- No rank is always the slowest. If step times have a standard deviation s, the slowest of W ranks takes about s × m(W)
  longer than the mean, where m(W) is the expected maximum of W draws from a standard normal distribution.
- Each rank sends as many bytes as in a ring all-reduce, 2 (W − 1) / W times its gradients, and up to a third more if W
  is not a power of two. What overlapped with the last lane's backward pass still overlaps; the rest is waited for.
- Every doubling beyond the largest number of processes measured adds to the uncertainty.
"""

from collections.abc import Sequence
from math import ceil, log2, sqrt
from statistics import NormalDist
from typing import NamedTuple

from lockstep.errors import UserError
from lockstep.observe.step_timing import RankTimes

_DOUBT_PER_DOUBLING = 0.06  # relative error of the time, per doubling beyond what was measured
_MIN_DOUBT = 0.02
_MIN_GAIN = 1.1  # speed-up over the next smaller number of processes, for more to be worth it
_BYTES_RATIO = 4 / 3  # to a ring all-reduce, if the number of processes is not a power of two


class MeasuredStep(NamedTuple):
    """The time of a step on some number of processes, on the rank that works longest: the others wait for it."""

    processes: int
    lanes: int  # of the busiest process
    data_s: float
    compute_s: float
    exchange_s: float
    travel_s: float | None  # sending gradients, including waiting for other ranks; None if not known
    rest_s: float  # update, and other code in the loop body
    spread_s: float  # standard deviation of compute_s from step to step
    step_s: float


class Prediction(NamedTuple):
    """A predicted step on some number of processes."""

    processes: int
    lanes: int  # of the busiest process
    step_s: float
    exchange_s: float
    speed_up: float  # against one process
    doubt: float  # relative error of the speed-up, in either direction
    measured: float | None = None  # speed-up, if it was measured

    @property
    def error(self) -> float | None:
        """The relative error of the predicted speed-up, if it was measured."""
        return None if self.measured is None else self.speed_up / self.measured - 1.0


def measured_step(times: Sequence[RankTimes]) -> MeasuredStep:
    """Summarize the timing of a run's ranks."""
    if not times:
        raise UserError("no step of this run has been timed: train for longer, or with log_every=1")
    busiest = max(times, key=lambda each: each.own_s)
    return MeasuredStep(
        processes=len(times),
        lanes=max(each.num_lanes for each in times),
        data_s=busiest.phases["data"],
        compute_s=busiest.phases["compute"],
        exchange_s=busiest.phases["exchange"],
        travel_s=busiest.travel_s,
        rest_s=busiest.phases["update"] + busiest.phases["rest"],
        spread_s=busiest.compute_spread_s,
        step_s=busiest.step_s,
    )


class ScalingModel:
    """A model fitted to runs of one config on different numbers of processes; one run is enough.

    Args:
        runs: the measurements, on different numbers of processes.
        num_lanes: the number of lanes of the config, which limits the number of processes.
    """

    def __init__(self, runs: Sequence[MeasuredStep], num_lanes: int) -> None:
        self._runs = sorted(runs, key=lambda run: run.processes)
        self._num_lanes = num_lanes
        fewest, most = self._runs[0], self._runs[-1]
        self._fewest, self._most = fewest, most
        self._lane_s = fewest.compute_s / fewest.lanes
        self._slowdown = 0.0  # of a lane, per doubling of the number of processes
        if most.processes > fewest.processes:
            slowdown = most.compute_s / most.lanes / self._lane_s - 1.0
            self._slowdown = max(0.0, slowdown) / log2(most.processes / fewest.processes)

    @property
    def knows_travel(self) -> bool:
        """Is anything known about communication? If not, predictions are upper bounds."""
        return self._most.processes > 1 and self._most.travel_s is not None

    def predict(self, processes: int) -> Prediction:
        """Predict a step on some number of processes, and the speed-up over one process."""
        lanes = ceil(self._num_lanes / processes)
        exchange_s = self._exchange_s(processes)
        step_s = self._step_s(processes, lanes, exchange_s)
        speed_up = self._step_s(1, self._num_lanes, 0.0) / step_s
        return Prediction(processes, lanes, step_s, exchange_s, speed_up, self._doubt(processes))

    def _step_s(self, processes: int, lanes: int, exchange_s: float) -> float:
        doublings = max(0.0, log2(processes / self._fewest.processes))
        lane_s = self._lane_s * (1.0 + self._slowdown * doublings)
        # The measurement already includes waiting for the slowest rank: only the increase is added.
        spread_s = self._most.spread_s * sqrt(lanes / self._most.lanes)
        waiting_s = spread_s * max(0.0, _expected_max(processes) - _expected_max(self._most.processes))
        data_s = self._fewest.data_s * lanes / self._fewest.lanes
        return data_s + lanes * lane_s + waiting_s + exchange_s + self._fewest.rest_s

    def _exchange_s(self, processes: int) -> float:
        if processes == 1 or not self.knows_travel:
            return 0.0
        assert self._most.travel_s is not None
        hidden_s = max(0.0, self._most.travel_s - self._most.exchange_s)
        travel_s = self._most.travel_s * _sent_bytes(processes) / _sent_bytes(self._most.processes)
        return max(0.0, travel_s - hidden_s)

    def _doubt(self, processes: int) -> float:
        if processes == 1:  # the baseline of all speed-ups
            return 0.0
        beyond = max(0.0, log2(processes / self._most.processes))
        measured = self._most.spread_s / self._most.step_s / 2
        return sqrt(max(_MIN_DOUBT, measured) ** 2 + (_DOUBT_PER_DOUBLING * beyond) ** 2)


def largest_worthwhile(predictions: Sequence[Prediction]) -> int:
    """Return the largest number of processes up to which each entry of this list, from one on, gains at least 10%."""
    most, speed_up = 1, 1.0
    for prediction in predictions:
        if prediction.processes > 1 and prediction.speed_up < _MIN_GAIN * speed_up:
            break
        most, speed_up = prediction.processes, prediction.speed_up
    return most


def _expected_max(count: int) -> float:
    """Return the expected maximum of `count` draws from a standard normal distribution, by Blom's formula."""
    return 0.0 if count == 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _sent_bytes(processes: int) -> float:
    """Return how many bytes a rank sends for each byte of gradients."""
    ring = 2 * (processes - 1) / processes
    return ring if processes & (processes - 1) == 0 else ring * _BYTES_RATIO
