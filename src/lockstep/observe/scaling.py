"""How fast a run would be on other numbers of processes: a model of a step, fitted to what few processes have shown.

A step on W processes takes

    data + lanes of the busiest process × seconds of a lane + waiting for the slowest and for gradients + rest

[Note: scaling model]
- A lane takes longer where more processes share a machine's memory and cores: what two have shown against one is added
  with every doubling.
- Nobody is always the slowest. If steps spread by s, the slowest of W takes about s × m(W) longer than the mean, where
  m is the mean of the largest of W draws from a normal distribution.
- Gradients travel as many bytes as in a ring, 2 (W − 1) / W of theirs; up to a third more where W is no power of two.
  What of it was hidden behind the last lane's backward pass stays hidden, and the rest is waited for.
- Beyond the most processes that were measured, each doubling adds to the doubt.
"""

from collections.abc import Sequence
from math import ceil, log2, sqrt
from statistics import NormalDist
from typing import NamedTuple

from lockstep.errors import UserError
from lockstep.observe.timing import RankTimes

_DOUBT_PER_DOUBLING = 0.06  # of the time, beyond what was measured
_LEAST_DOUBT = 0.02
_WORTH_IT = 1.1  # times as fast as with the next fewer processes
_OTHER_BYTES = 4 / 3  # where the number of processes is no power of two


class Measured(NamedTuple):
    """A step of a run on so many processes, in seconds: of the rank that works longest, for which the others wait."""

    processes: int
    lanes: int  # of the busiest process
    data_s: float
    compute_s: float
    exchange_s: float
    travel_s: float | None
    rest_s: float  # update, and the rest of the loop's body
    spread_s: float  # of compute from step to step, as a standard deviation
    step_s: float


class Prediction(NamedTuple):
    processes: int
    lanes: int
    step_s: float
    exchange_s: float
    speed_up: float  # against one process
    doubt: float  # as a share of the speed-up, either way
    measured: float | None = None  # the speed-up, where that is known

    @property
    def error(self) -> float | None:
        """Of the prediction, as a share of what was measured."""
        return None if self.measured is None else self.speed_up / self.measured - 1.0


def measured(times: Sequence[RankTimes]) -> Measured:
    """What the ranks' times come to."""
    if not times:
        raise UserError("no step of this run was timed: let it run for longer, or with log_every=1")
    busiest = max(times, key=lambda each: each.own_s)
    return Measured(
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
    """Fitted to runs of the same config on different numbers of processes; one is enough."""

    def __init__(self, runs: Sequence[Measured], num_lanes: int) -> None:
        self._runs = sorted(runs, key=lambda run: run.processes)
        self._num_lanes = num_lanes
        fewest, most = self._runs[0], self._runs[-1]
        self._fewest, self._most = fewest, most
        self._lane_s = fewest.compute_s / fewest.lanes
        self._crowding = 0.0  # how much longer a lane takes with every doubling
        if most.processes > fewest.processes:
            slower = most.compute_s / most.lanes / self._lane_s - 1.0
            self._crowding = max(0.0, slower) / log2(most.processes / fewest.processes)

    @property
    def knows_travel(self) -> bool:
        """Else nothing is known of what gradients take, and predictions are what is possible at best."""
        return self._most.processes > 1 and self._most.travel_s is not None

    def predict(self, processes: int) -> Prediction:
        lanes = ceil(self._num_lanes / processes)
        exchange_s = self._exchange_s(processes)
        step_s = self._step_s(processes, lanes, exchange_s)
        speed_up = self._step_s(1, self._num_lanes, 0.0) / step_s
        return Prediction(processes, lanes, step_s, exchange_s, speed_up, self._doubt(processes))

    def _step_s(self, processes: int, lanes: int, exchange_s: float) -> float:
        doublings = max(0.0, log2(processes / self._fewest.processes))
        lane_s = self._lane_s * (1.0 + self._crowding * doublings)
        # As far as it was measured, it is in the lanes of the slowest and in the exchange already.
        spread_s = self._most.spread_s * sqrt(lanes / self._most.lanes)
        waiting_s = spread_s * max(0.0, _largest_of(processes) - _largest_of(self._most.processes))
        data_s = self._fewest.data_s * lanes / self._fewest.lanes
        return data_s + lanes * lane_s + waiting_s + exchange_s + self._fewest.rest_s

    def _exchange_s(self, processes: int) -> float:
        if processes == 1 or not self.knows_travel:
            return 0.0
        assert self._most.travel_s is not None
        hidden_s = max(0.0, self._most.travel_s - self._most.exchange_s)
        travel_s = self._most.travel_s * _bytes_of(processes) / _bytes_of(self._most.processes)
        return max(0.0, travel_s - hidden_s)

    def _doubt(self, processes: int) -> float:
        if processes == 1:  # speed-ups are told against it
            return 0.0
        beyond = max(0.0, log2(processes / self._most.processes))
        own = self._most.spread_s / self._most.step_s / 2
        return sqrt(max(_LEAST_DOUBT, own) ** 2 + (_DOUBT_PER_DOUBLING * beyond) ** 2)


def largest_worth_it(predictions: Sequence[Prediction]) -> int:
    """The most processes that are still a tenth faster than the next fewer ones in this list, or than one."""
    most, speed_up = 1, 1.0
    for prediction in predictions:
        if prediction.processes > 1 and prediction.speed_up < _WORTH_IT * speed_up:
            break
        most, speed_up = prediction.processes, prediction.speed_up
    return most


def _largest_of(count: int) -> float:
    """The mean of the largest of so many draws from a normal distribution, by Blom's formula."""
    return 0.0 if count == 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def _bytes_of(processes: int) -> float:
    """That a rank sends of a gradient of one byte."""
    ring = 2 * (processes - 1) / processes
    return ring if processes & (processes - 1) == 0 else ring * _OTHER_BYTES
