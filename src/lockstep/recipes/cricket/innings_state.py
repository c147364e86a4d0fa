"""The state of an innings before each ball, as numbers: what the scoreboard shows.

A row is computed before its ball is read, so it cannot depend on the outcome of that ball or of a later one.
"""

from math import log1p
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.recipes.cricket.match import OUTCOMES, WICKET, Delivery, Innings

MAX_OVERS = 50  # later overs count as the last of these
MAX_WICKETS = 10
NUM_STAGES = 3  # first innings, later innings, super overs
NUM_CELLS = NUM_STAGES * MAX_OVERS * (MAX_WICKETS + 1)

_USUAL_RATE = 1.2  # runs per ball
_USUAL_DOTS = 0.4  # share of balls
_DOT, _FOUR, _SIX = (OUTCOMES.index(name) for name in ("dot", "four", "six"))


class InningsState(NamedTuple):
    """The states before each ball, one row per ball."""

    numbers: NDArray[np.float32]  # (balls, NUM_NUMBERS)
    cells: NDArray[np.int64]  # (stage, over, wickets) as one number: the input of the table model
    overs: NDArray[np.int64]


def describe_innings(innings: Innings, stage: int, balls_per_over: int) -> InningsState:
    """Return the state before each ball. `stage`: 0 for the first innings, 1 for later ones, 2 for a super over."""
    tracker = _Tracker(innings, stage, balls_per_over)
    numbers, cells, overs = [], [], []
    for ball in innings.deliveries:
        tracker.face(ball)
        numbers.append(tracker.numbers(ball))
        over = min(ball.over, MAX_OVERS - 1)
        overs.append(over)
        cells.append((stage * MAX_OVERS + over) * (MAX_WICKETS + 1) + min(tracker.wickets, MAX_WICKETS))
        tracker.advance(ball)
    return InningsState(
        np.array(numbers, np.float32).reshape(len(numbers), NUM_NUMBERS),
        np.array(cells, np.int64),
        np.array(overs, np.int64),
    )


class _Figures:
    """What one player has done in this innings, batting or bowling."""

    __slots__ = ("balls", "boundaries", "dots", "dots_in_a_row", "position", "runs", "wickets")

    def __init__(self, position: int) -> None:
        self.position = position  # in the batting or bowling order, from 0
        self.balls = self.runs = self.dots = self.boundaries = self.wickets = self.dots_in_a_row = 0

    def add(self, ball: Delivery, runs: int) -> None:
        self.balls += not ball.is_wide
        self.runs += runs
        is_dot = ball.outcome == _DOT and not ball.is_wide
        self.dots += is_dot
        self.dots_in_a_row = self.dots_in_a_row + 1 if is_dot else 0
        self.boundaries += ball.outcome in (_FOUR, _SIX)
        self.wickets += ball.outcome == WICKET

    def summary(self) -> list[float]:
        """Return the features. Rates are shrunk to the usual ones while there are few balls."""
        return [
            log1p(self.balls) / 3,
            self.balls / 50,
            (self.runs + 10 * _USUAL_RATE) / (self.balls + 10) - _USUAL_RATE,
            2 * ((self.dots + 10 * _USUAL_DOTS) / (self.balls + 10) - _USUAL_DOTS),
            4 * self.boundaries / (self.balls + 10),
            float(self.balls == 0),
            self.wickets / 2,
            min(self.dots_in_a_row, 6) / 3,
        ]


class _Tracker:
    """Follows an innings ball by ball."""

    def __init__(self, innings: Innings, stage: int, balls_per_over: int) -> None:
        self.wickets = 0
        self._innings = innings
        self._stage = stage
        self._balls_per_over = balls_per_over
        self._num_balls = max(int(innings.max_overs * balls_per_over), 1)
        self._runs = self._balls = 0
        self._over = -1
        self._start_over()
        self._partnership_runs = self._partnership_balls = 0
        self._batters: dict[str, _Figures] = {}
        self._bowlers: dict[str, _Figures] = {}
        self._history: list[tuple[int, int]] = []  # total runs and wickets of each delivery
        self._is_free_hit = False
        self._last: Delivery | None = None

    def _start_over(self) -> None:
        self._over_balls = self._over_deliveries = self._over_runs = self._over_wickets = self._over_boundaries = 0

    def face(self, ball: Delivery) -> None:
        """Note who bats and bowls, and in which over, which is known before the ball is bowled."""
        if ball.over != self._over:
            self._over = ball.over
            self._start_over()
        for name in (ball.batter, ball.non_striker):
            if name not in self._batters:
                self._batters[name] = _Figures(len(self._batters))
        if ball.bowler not in self._bowlers:
            self._bowlers[ball.bowler] = _Figures(len(self._bowlers))

    def numbers(self, ball: Delivery) -> list[float]:
        return [*self._clock(ball), *self._score(), *self._chase(), *self._people(ball), *self._lately(ball)]

    def _clock(self, ball: Delivery) -> list[float]:
        left = max(self._num_balls - self._balls, 0)
        in_over = min(self._over_balls, 6)
        return [
            float(self._stage == 1),
            float(self._stage == 2),
            ball.over / 20,
            left / 60 - 1,
            1 / (1 + left / 6),
            float(ball.over < self._innings.powerplay),
            float(left <= self._balls_per_over),
            *(float(in_over == number) for number in range(7)),
            (self._over_deliveries - self._over_balls) / 2,
        ]

    def _score(self) -> list[float]:
        return [
            self._runs / 100 - 1,
            self.wickets / 5 - 1,
            (self._runs + 24 * _USUAL_RATE) / (self._balls + 24) - _USUAL_RATE,
            self._partnership_runs / 40,
            self._partnership_balls / 40,
            float(self._partnership_balls == 0),
            self._over_runs / 6,
            self._over_wickets,
            self._over_boundaries,
            float(self._is_free_hit),
        ]

    def _chase(self) -> list[float]:
        if self._innings.target is None:
            return [0.0] * 8
        needed = self._innings.target - self._runs
        left = max(self._num_balls - self._balls, 1)
        rate = min(max(needed / left, 0.0), 6.0)
        return [
            1.0,
            needed / 60 - 1,
            rate - 1.3,
            min(rate, 2.0) ** 2 / 2,
            float(needed <= 1),
            float(needed <= 6),
            float(rate > 3),
            (rate - 1.3) / (1 + left / 24),
        ]

    def _people(self, ball: Delivery) -> list[float]:
        batter, partner = self._batters[ball.batter], self._batters[ball.non_striker]
        bowler = self._bowlers[ball.bowler]
        return [
            *batter.summary(),
            *partner.summary(),
            *bowler.summary(),
            batter.position / 5 - 1,
            partner.position / 5 - 1,
            bowler.position / 5,
        ]

    def _lately(self, ball: Delivery) -> list[float]:
        six, thirty = self._history[-6:], self._history[-30:]
        last = self._last
        return [
            sum(runs for runs, _ in six) / 8,
            sum(runs for runs, _ in thirty) / 36,
            sum(out for _, out in six),
            sum(out for _, out in thirty) / 2,
            float(last is not None and last.batter == ball.batter),
            float(last is not None and last.bowler == ball.bowler),
            float(last is not None and last.is_wide),
        ]

    def advance(self, ball: Delivery) -> None:
        self._batters[ball.batter].add(ball, ball.runs)
        self._bowlers[ball.bowler].add(ball, ball.total)
        self._runs += ball.total
        self._balls += ball.is_legal
        self._over_balls += ball.is_legal
        self._over_deliveries += 1
        self._over_runs += ball.total
        self._over_boundaries += ball.outcome in (_FOUR, _SIX)
        self._partnership_runs += ball.total
        self._partnership_balls += ball.is_legal
        self._history.append((ball.total, len(ball.out)))
        if ball.out:
            self.wickets += len(ball.out)
            self._over_wickets += 1
            self._partnership_runs = self._partnership_balls = 0
        # A free hit stays one until a legal ball has been bowled.
        self._is_free_hit = ball.is_no_ball or (self._is_free_hit and ball.is_wide)
        self._last = ball


NUM_NUMBERS = 15 + 10 + 8 + 27 + 7
