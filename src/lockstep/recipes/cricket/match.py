"""Matches as plain values, ball by ball, and their split into training and test sets."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lockstep.errors import UserError
from lockstep.world.keyed_random import key_of

OUTCOMES = ("dot", "one", "two", "three", "four", "six", "wicket")
NUM_OUTCOMES = len(OUTCOMES)
WICKET = OUTCOMES.index("wicket")

# Runs off the bat → outcome. Fives count as fours, and sevens as sixes; together they are one ball in 6,000.
_BY_RUNS = (0, 1, 2, 3, 4, 4, 5)


def outcome_of(runs_off_bat: int, is_wicket: bool) -> int:
    """Return the outcome of a ball. Extras do not count: a wide is a dot. A wicket counts whatever runs were scored."""
    return WICKET if is_wicket else _BY_RUNS[min(runs_off_bat, len(_BY_RUNS) - 1)]


class Delivery(NamedTuple):
    """One ball."""

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
    """One innings."""

    team: str
    opponent: str
    is_super_over: bool
    target: int | None  # runs to win
    max_overs: float  # for a chase, the overs that the target was set for
    powerplay: int  # overs with fielding restrictions, at the start
    deliveries: tuple[Delivery, ...]


class Match(NamedTuple):
    """One match."""

    name: str
    date: str  # of the first day, as 2016-06-20
    venue: str
    balls_per_over: int
    innings: tuple[Innings, ...]


SplitRule = Literal["match", "date"]

_HASH_BUCKETS = 10_000


class MatchSplit(NamedTuple):
    """Matches for training and for the test; the same on every machine."""

    train: list[Match]  # in their given order, by date
    test: list[Match]


def split_matches(matches: Sequence[Match], rule: SplitRule, share: float, purpose: str) -> MatchSplit:
    """Hold out about this share: by a hash of the match's name, or the latest by date.

    `purpose` keys the hash, so that splits for different purposes are independent.
    """
    if rule == "match":
        chosen = {
            match.name for match in matches if key_of(0, purpose, match.name) % _HASH_BUCKETS < share * _HASH_BUCKETS
        }
    else:
        first_day = matches[min(int(len(matches) * (1 - share)), len(matches) - 1)].date
        chosen = {match.name for match in matches if match.date >= first_day}
    split = MatchSplit(
        [match for match in matches if match.name not in chosen], [match for match in matches if match.name in chosen]
    )
    if not all(any(innings.deliveries for match in part for innings in match.innings) for part in split):
        raise UserError(
            f"data.split={rule}: {len(split.train)} matches for training and {len(split.test)} for the {purpose}: "
            "both need matches with balls bowled; give more matches"
        )
    return split
