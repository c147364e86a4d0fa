"""What a match is, once it has been read: plain values, and the outcome of each ball."""

from typing import NamedTuple

OUTCOMES = ("dot", "one", "two", "three", "four", "six", "wicket")
NUM_OUTCOMES = len(OUTCOMES)
WICKET = OUTCOMES.index("wicket")

# Runs off the bat → outcome. Fives and sevens, one ball in 6,000, count as the boundary that all but a few began as.
_BY_RUNS = (0, 1, 2, 3, 4, 4, 5)


def outcome_of(runs_off_bat: int, is_wicket: bool) -> int:
    """The outcome of a ball. Extras are no runs off the bat: a wide is a dot, a wicket is one whatever was run."""
    return WICKET if is_wicket else _BY_RUNS[min(runs_off_bat, len(_BY_RUNS) - 1)]


class Delivery(NamedTuple):
    over: int  # counts from 0
    batter: str  # people by their id in Cricsheet's register
    non_striker: str
    bowler: str
    runs: int  # off the bat
    total: int  # with extras
    is_wide: bool
    is_no_ball: bool
    out: tuple[str, ...]  # who was out, or retired
    outcome: int

    @property
    def is_legal(self) -> bool:
        return not (self.is_wide or self.is_no_ball)


class Innings(NamedTuple):
    team: str
    opponent: str
    is_super_over: bool
    target: int | None  # runs to win
    max_overs: float  # that may be bowled; of a chase, what the target was set for
    powerplay: int  # overs with fielding restrictions, at the start
    deliveries: tuple[Delivery, ...]


class Match(NamedTuple):
    name: str
    date: str  # of the first day, as 2016-06-20
    venue: str
    balls_per_over: int
    innings: tuple[Innings, ...]
