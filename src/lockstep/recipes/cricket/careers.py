"""Features from the past: the table model of outcomes, and the careers of players, teams and grounds.

**The table model** is the baseline: how often each outcome occurred in the training matches, overall and for each cell
of stage (first innings, later innings, super over), over and wickets lost. The counts of a cell are smoothed towards
the base rate, as if `smoothing` more balls with the base rate's outcomes had been seen in it; the smoothing is the one
that works best on some of the training matches.

**Careers** are what was observed before a match's day, relative to what was expected. The figure of an outcome is
log(seen / expected), both shrunk to the base rate while there are few balls. What is expected is the
table model's prediction for the same balls, corrected by the figures of the opponents: a player who bats in the last
overs, or against the weakest bowlers, is not mistaken for a hitter.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lockstep.recipes.cricket.innings_state import NUM_CELLS
from lockstep.recipes.cricket.match import NUM_OUTCOMES, Innings, Match

_SMOOTHINGS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
_MIN_BALLS = 1.0  # spread over all outcomes, so that an outcome never seen is not impossible


class Balls(NamedTuple):
    """The balls of some matches, concatenated."""

    cells: NDArray[np.int64]
    outcomes: NDArray[np.int64]


class Table(NamedTuple):
    """The table model: probabilities of outcomes by cell."""

    base: NDArray[np.float64]  # (outcomes): shares
    probabilities: NDArray[np.float64]  # (cells, outcomes)
    smoothing: float


def fit_table(balls: Balls, held_out: Balls, rest: Balls) -> Table:
    """Fit a table to all balls, with the smoothing with which a table fitted to `rest` predicts `held_out` best."""
    counts, base = _counts(rest), base_rate(rest)
    losses = [log_loss(_smoothed(counts, base, each), held_out) for each in _SMOOTHINGS]
    smoothing = _SMOOTHINGS[int(np.argmin(losses))]
    return Table(base_rate(balls), _smoothed(_counts(balls), base_rate(balls), smoothing), smoothing)


def base_rate(balls: Balls) -> NDArray[np.float64]:
    """Return the share of each outcome."""
    counts = np.bincount(balls.outcomes, minlength=NUM_OUTCOMES) + _MIN_BALLS / NUM_OUTCOMES
    return np.asarray(counts / counts.sum())


def log_loss(probabilities: NDArray[np.float64], balls: Balls) -> float:
    """Return the mean negative log-probability of the outcomes."""
    return float(-np.log(probabilities[balls.cells, balls.outcomes]).mean())


def _counts(balls: Balls) -> NDArray[np.float64]:
    flat = np.bincount(balls.cells * NUM_OUTCOMES + balls.outcomes, minlength=NUM_CELLS * NUM_OUTCOMES)
    return flat.reshape(NUM_CELLS, NUM_OUTCOMES).astype(np.float64)


def _smoothed(counts: NDArray[np.float64], base: NDArray[np.float64], smoothing: float) -> NDArray[np.float64]:
    return np.asarray((counts + smoothing * base) / (counts.sum(1, keepdims=True) + smoothing))


NUM_FIGURES = 2 * (NUM_OUTCOMES + 1) + 2  # all and recent balls: outcomes and wides; usual over; number of balls
NUM_PLAYER_FIGURES = 2 * NUM_FIGURES  # batting and bowling
NUM_SETTING_FIGURES = 4 * NUM_FIGURES + 1  # batting team, bowling team, ground, this match so far; year

_SHRINKAGE = 60.0  # pseudo-balls at the base rate
_DECAY = 0.9  # of earlier matches in recent figures, per match
_WIDES = 0.038  # share of all balls
_USUAL_OVER = 9.0
_FIRST_YEAR, _YEARS = 2015, 10
_SCALE = 4.0  # brings figures to the scale of other inputs

Floats = NDArray[np.float64]


class InningsCareers(NamedTuple):
    """Career figures before an innings, of its players and of its setting."""

    players: dict[str, NDArray[np.float32]]
    setting: NDArray[np.float32]


class MatchCells(NamedTuple):
    """A match, with the table cell of each of its balls."""

    match: Match
    cells: list[NDArray[np.int64]]  # of each innings


def careers_before(
    matches: Iterable[MatchCells], table: Table, wanted: frozenset[str]
) -> dict[tuple[str, int], InningsCareers]:
    """Return the careers before each innings of the wanted matches, by match name and innings number.

    `matches` are sorted by date. Matches of one day do not count for each other, because their order is unknown. Within
    a match, only its earlier innings count.
    """
    book = _CareerBook(table)
    found = {}
    for _, day in groupby(matches, key=lambda each: each.match.date):
        of_day = list(day)
        for each in of_day:
            if each.match.name in wanted:
                for number in range(len(each.match.innings)):
                    found[each.match.name, number] = book.look_up(each, number)
        additions = [addition for each in of_day for addition in book.additions(each)]
        for role, name, sums in additions:  # only after all matches of the day have been looked up
            book.add(role, name, sums)
    return found


class _Sums(NamedTuple):
    """Sums over some balls, by outcome; the last column of the first two is wides."""

    seen: Floats
    expected: Floats
    overs: float  # sum of the overs' numbers


class _Record:
    """All balls so far, and recent ones, of one player, team or ground."""

    __slots__ = ("_expected", "_overs", "_recent_expected", "_recent_seen", "_seen")

    def __init__(self) -> None:
        self._seen, self._expected, self._recent_seen, self._recent_expected = np.zeros((4, NUM_OUTCOMES + 1))
        self._overs = 0.0

    def add(self, sums: _Sums) -> None:
        self._seen += sums.seen
        self._expected += sums.expected
        self._recent_seen = _DECAY * self._recent_seen + sums.seen
        self._recent_expected = _DECAY * self._recent_expected + sums.expected
        self._overs += sums.overs

    def figures(self, usual: Floats) -> Floats:
        return np.asarray(np.log((self._seen + usual) / (self._expected + usual)))

    def summary(self, usual: Floats) -> Floats:
        recent = np.log((self._recent_seen + usual) / (self._recent_expected + usual))
        balls = self._seen[:-1].sum()
        over = (self._overs + _SHRINKAGE * _USUAL_OVER) / (balls + _SHRINKAGE) - _USUAL_OVER
        return np.concatenate([_SCALE * self.figures(usual), _SCALE * recent, [over / 5, np.log1p(balls) / 5]])


class _Addition(NamedTuple):
    role: str
    name: str
    sums: _Sums


class _CareerBook:
    """The careers so far: a record for each player, team and ground, in each of its roles."""

    def __init__(self, table: Table) -> None:
        self._usual = _SHRINKAGE * np.append(table.base, _WIDES)
        self._probabilities = np.concatenate(
            [table.probabilities, np.full((len(table.probabilities), 1), _WIDES)], axis=1
        )
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
        """What a match adds to each record, given the figures before the match."""
        match, cells = cells_of
        for innings, of_innings in zip(match.innings, cells, strict=True):
            if not innings.deliveries:
                continue
            seen, expected = _seen(innings), self._probabilities[of_innings]
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
                record.add(_sums(_seen(innings), self._probabilities[of_innings], overs))
        return record

    def _known(self, role: str, name: str) -> Floats:
        record = self._records.get((role, name))
        return np.zeros(NUM_FIGURES) if record is None else record.summary(self._usual)

    def _figures_of(self, role: str, names: list[str]) -> Floats:
        """The figures of each name, one row per ball."""
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
