"""Careers so far: what players, teams and grounds have seen in the matches before a day, against what was expected.

An outcome's figure is log(seen / expected), both leaning to the base rate while there are few balls. Expected is what
the table model says of the same balls, corrected by the figures of who was on the other side: who bats in the last
overs, or against the weakest bowlers, is not taken for a hitter because of that.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.recipes.cricket.match import NUM_OUTCOMES, Innings, Match
from lockstep.recipes.cricket.table import Table

NUM_FIGURES = 2 * (NUM_OUTCOMES + 1) + 2  # of all balls and of late, outcomes and wides; usual over; number of balls
NUM_PLAYER_FIGURES = 2 * NUM_FIGURES  # with the bat, and with the ball
NUM_SETTING_FIGURES = 4 * NUM_FIGURES + 1  # batting team, bowling team, ground, this match so far; and the year

_SHRINKAGE = 60.0  # balls that count as usual
_FADING = 0.9  # what a match leaves of earlier ones, of late
_WIDES = 0.038  # of all balls
_USUAL_OVER = 9.0
_FIRST_YEAR, _YEARS = 2015, 10
_SCALE = 4.0  # brings figures to the size of other inputs

Floats = NDArray[np.float64]


class InningsCareers(NamedTuple):
    players: dict[str, NDArray[np.float32]]
    setting: NDArray[np.float32]


class MatchCells(NamedTuple):
    match: Match
    cells: list[NDArray[np.int64]]  # of each innings


def careers_before(
    matches: Iterable[MatchCells], table: Table, wanted: frozenset[str]
) -> dict[tuple[str, int], InningsCareers]:
    """For each innings of the wanted matches, by name and number: careers from the matches of earlier days.

    `matches` come by date. Those of one day do not count for each other: which was first is not told. Of the match
    itself, only its innings before this one do.
    """
    book = _Book(table)
    found = {}
    for _, day in groupby(matches, key=lambda each: each.match.date):
        of_day = list(day)
        for each in of_day:
            if each.match.name in wanted:
                for number in range(len(each.match.innings)):
                    found[each.match.name, number] = book.look_up(each, number)
        additions = [addition for each in of_day for addition in book.additions(each)]
        for role, name, sums in additions:  # after all of the day have been looked up
            book.add(role, name, sums)
    return found


class _Sums(NamedTuple):
    """Of some balls, by outcome; the last column of the first two is wides."""

    seen: Floats
    expected: Floats
    overs: float  # of their overs' numbers


class _Record:
    """All balls so far, and those of late: of one player, team or ground."""

    __slots__ = ("_expected", "_late_expected", "_late_seen", "_overs", "_seen")

    def __init__(self) -> None:
        self._seen, self._expected, self._late_seen, self._late_expected = np.zeros((4, NUM_OUTCOMES + 1))
        self._overs = 0.0

    def add(self, sums: _Sums) -> None:
        self._seen += sums.seen
        self._expected += sums.expected
        self._late_seen = _FADING * self._late_seen + sums.seen
        self._late_expected = _FADING * self._late_expected + sums.expected
        self._overs += sums.overs

    def figures(self, usual: Floats) -> Floats:
        return np.asarray(np.log((self._seen + usual) / (self._expected + usual)))

    def summary(self, usual: Floats) -> Floats:
        late = np.log((self._late_seen + usual) / (self._late_expected + usual))
        balls = self._seen[:-1].sum()
        over = (self._overs + _SHRINKAGE * _USUAL_OVER) / (balls + _SHRINKAGE) - _USUAL_OVER
        return np.concatenate([_SCALE * self.figures(usual), _SCALE * late, [over / 5, np.log1p(balls) / 5]])


class _Addition(NamedTuple):
    role: str
    name: str
    sums: _Sums


class _Book:
    def __init__(self, table: Table) -> None:
        self._usual = _SHRINKAGE * np.append(table.base, _WIDES)
        self._chances = np.concatenate([table.chances, np.full((len(table.chances), 1), _WIDES)], axis=1)
        self._records: defaultdict[tuple[str, str], _Record] = defaultdict(_Record)
        self._nothing = np.zeros(NUM_OUTCOMES + 1)

    def look_up(self, cells_of: MatchCells, number: int) -> InningsCareers:
        match, cells = cells_of
        innings = match.innings[number]
        players = dict.fromkeys(
            name for ball in innings.deliveries for name in (ball.batter, ball.non_striker, ball.bowler)
        )
        setting = [
            self._known("team bats", innings.team),
            self._known("team bowls", innings.opponent),
            self._known("ground", match.venue),
            self._so_far(match.innings[:number], cells).summary(self._usual),
            np.array([(int(match.date[:4]) - _FIRST_YEAR) / _YEARS]),
        ]
        both = {name: [self._known("bats", name), self._known("bowls", name)] for name in players}
        return InningsCareers(
            {name: np.concatenate(figures).astype(np.float32) for name, figures in both.items()},
            np.concatenate(setting).astype(np.float32),
        )

    def additions(self, cells_of: MatchCells) -> Iterable[_Addition]:
        """What a match adds to each record, by the figures from before it."""
        match, cells = cells_of
        for innings, of_innings in zip(match.innings, cells, strict=True):
            if not innings.deliveries:
                continue
            seen, expected = _seen(innings), self._chances[of_innings]
            batters = [ball.batter for ball in innings.deliveries]
            bowlers = [ball.bowler for ball in innings.deliveries]
            batting, bowling = self._figures_of("bats", batters), self._figures_of("bowls", bowlers)
            against_bowling, against_batting = _corrected(expected, bowling), _corrected(expected, batting)
            overs = np.array([ball.over for ball in innings.deliveries], np.float64)
            yield from _by_name("bats", batters, seen, against_bowling, overs)
            yield from _by_name("bowls", bowlers, seen, against_batting, overs)
            yield _Addition("team bats", innings.team, _sums(seen, against_bowling, overs))
            yield _Addition("team bowls", innings.opponent, _sums(seen, against_batting, overs))
            yield _Addition("ground", match.venue, _sums(seen, _corrected(expected, batting + bowling), overs))

    def add(self, role: str, name: str, sums: _Sums) -> None:
        self._records[role, name].add(sums)

    def _so_far(self, earlier: Sequence[Innings], cells: list[NDArray[np.int64]]) -> _Record:
        record = _Record()
        for innings, of_innings in zip(earlier, cells, strict=False):
            if innings.deliveries:
                overs = np.array([ball.over for ball in innings.deliveries], np.float64)
                record.add(_sums(_seen(innings), self._chances[of_innings], overs))
        return record

    def _known(self, role: str, name: str) -> Floats:
        record = self._records.get((role, name))
        return np.zeros(NUM_FIGURES) if record is None else record.summary(self._usual)

    def _figures_of(self, role: str, names: list[str]) -> Floats:
        """The figures of each name, one row a ball."""
        known = {name: self._records.get((role, name)) for name in set(names)}
        figures = {
            name: self._nothing if record is None else record.figures(self._usual) for name, record in known.items()
        }
        return np.stack([figures[name] for name in names])


def _seen(innings: Innings) -> Floats:
    seen = np.zeros((len(innings.deliveries), NUM_OUTCOMES + 1))
    seen[np.arange(len(seen)), [ball.outcome for ball in innings.deliveries]] = 1
    seen[:, -1] = [ball.is_wide for ball in innings.deliveries]
    return seen


def _corrected(expected: Floats, figures: Floats) -> Floats:
    corrected = expected * np.exp(figures)
    corrected[:, :-1] /= corrected[:, :-1].sum(1, keepdims=True)
    return np.asarray(corrected)


def _sums(seen: Floats, expected: Floats, overs: Floats) -> _Sums:
    return _Sums(seen.sum(0), expected.sum(0), float(overs.sum()))


def _by_name(role: str, names: list[str], seen: Floats, expected: Floats, overs: Floats) -> Iterable[_Addition]:
    rows: defaultdict[str, list[int]] = defaultdict(list)
    for row, name in enumerate(names):
        rows[name].append(row)
    for name, of_name in rows.items():
        yield _Addition(role, name, _sums(seen[of_name], expected[of_name], overs[of_name]))
