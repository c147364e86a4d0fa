"""From matches to what is trained on: split, table model, careers and records, in the order that lets nothing leak."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lockstep.recipes.cricket.careers import InningsCareers, MatchCells, careers_before
from lockstep.recipes.cricket.match import Innings, Match
from lockstep.recipes.cricket.records import InningsRecord, record
from lockstep.recipes.cricket.split import Rule, split_matches
from lockstep.recipes.cricket.state import InningsState, describe
from lockstep.recipes.cricket.table import Balls, Table, fit

_CHECK_EVERY = 5  # training matches, to choose the table's smoothing


class League(NamedTuple):
    train: list[InningsRecord]
    test: list[InningsRecord]
    table: Table
    num_players: int  # that are known from training


class _Described(NamedTuple):
    match: Match
    states: list[InningsState]  # of each innings


def make_league(matches: Sequence[Match], rule: Rule, share: float, evaluate_on: str) -> League:
    """`matches` by date. To evaluate on validation: the test matches are left out, and others held out instead."""
    split = split_matches(matches, rule, share, "test")
    if evaluate_on == "validation":
        split = split_matches(split.train, rule, share, "validation")
    train, test = ([_described(match) for match in part] for part in split)
    table = _table_of(train)
    identities = _identities(split.train)
    # Training sees nothing of the test matches; a test match's players bring all that came before its day.
    names = frozenset(match.name for match in split.train)
    before_train = _careers(train, table, names)
    before_test = _careers(
        sorted(train + test, key=lambda each: (each.match.date, each.match.name)),
        table,
        frozenset(match.name for match in split.test),
    )
    return League(
        _records(train, before_train, table, identities),
        _records(test, before_test, table, identities),
        table,
        len(identities),
    )


def _described(match: Match) -> _Described:
    states = [describe(each, _stage(each, number), match.balls_per_over) for number, each in enumerate(match.innings)]
    return _Described(match, states)


def _stage(innings: Innings, number: int) -> int:
    return 2 if innings.is_super_over else min(number, 1)


def _table_of(train: Sequence[_Described]) -> Table:
    """Its smoothing is what does best on every fifth of the training matches, for a table of the others."""
    check = train[::_CHECK_EVERY]
    rest = [each for number, each in enumerate(train) if number % _CHECK_EVERY] or train
    return fit(_balls(train), _balls(check), _balls(rest))


def _balls(matches: Sequence[_Described]) -> Balls:
    return Balls(
        np.concatenate([state.cells for each in matches for state in each.states]),
        np.array([ball.outcome for each in matches for innings in each.match.innings for ball in innings.deliveries]),
    )


def _careers(
    matches: Sequence[_Described], table: Table, wanted: frozenset[str]
) -> dict[tuple[str, int], InningsCareers]:
    return careers_before(
        (MatchCells(match, [state.cells for state in states]) for match, states in matches), table, wanted
    )


def _identities(train: Sequence[Match]) -> dict[str, int]:
    """Numbers from 1 for everybody who has batted or bowled in training; 0 is for strangers."""
    found: dict[str, int] = {}
    for match in train:
        for innings in match.innings:
            for ball in innings.deliveries:
                for name in (ball.batter, ball.non_striker, ball.bowler):
                    found.setdefault(name, 1 + len(found))
    return found


def _records(
    matches: Sequence[_Described],
    careers: dict[tuple[str, int], InningsCareers],
    table: Table,
    identities: dict[str, int],
) -> list[InningsRecord]:
    return [
        record(match.name, innings, state, careers[match.name, number], table, identities)
        for match, states in matches
        for number, (innings, state) in enumerate(zip(match.innings, states, strict=True))
        if innings.deliveries
    ]
