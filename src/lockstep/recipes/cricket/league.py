"""Prepare matches for training: split, table model, careers and tensors, with nothing leaking into training."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.recipes.cricket.careers import Balls, InningsCareers, MatchCells, Table, careers_before, fit_table
from lockstep.recipes.cricket.innings_state import NUM_NUMBERS, InningsState, describe_innings
from lockstep.recipes.cricket.match import NUM_OUTCOMES, Delivery, Innings, Match, SplitRule, split_matches

ROLES = ("batter", "non_striker", "bowler")
NUM_INPUTS = NUM_NUMBERS + NUM_OUTCOMES  # of a ball: the state, and the innings so far
NUM_RESULTS = NUM_OUTCOMES + 2  # the outcomes, a wide, a no-ball

_INNINGS_SHRINKAGE = 30.0  # pseudo-balls at the base rate
_WIDE, _NO_BALL = NUM_OUTCOMES, NUM_OUTCOMES + 1


class InningsRecord(NamedTuple):
    """An innings as tensors: everything that its graph is made of."""

    match: str
    numbers: Tensor  # (balls, …)
    overs: Tensor  # (balls)
    cells: Tensor  # (balls)
    outcomes: Tensor  # (balls)
    results: Tensor  # (balls): what is sent to later balls
    players: Tensor  # (roles, balls): rows of `identities` and `figures`
    identities: Tensor  # (players); 0: unknown
    figures: Tensor  # (players, …)
    setting: Tensor  # (1, …)


def innings_record(
    match: str,
    innings: Innings,
    state: InningsState,
    careers: InningsCareers,
    table: Table,
    identities: Mapping[str, int],
) -> InningsRecord:
    """Convert an innings to tensors."""
    places = {name: place for place, name in enumerate(careers.players)}
    balls = innings.deliveries
    players = [[places[getattr(ball, role)] for ball in balls] for role in ROLES]
    return InningsRecord(
        match,
        torch.from_numpy(np.concatenate([state.numbers, _innings_so_far(innings, state, table)], axis=1)),
        torch.from_numpy(state.overs),
        torch.from_numpy(state.cells),
        torch.tensor([ball.outcome for ball in balls]),
        torch.tensor([_result(ball) for ball in balls]),
        torch.tensor(players),
        torch.tensor([identities.get(name, 0) for name in careers.players]),
        torch.from_numpy(np.stack(list(careers.players.values()))),
        torch.from_numpy(careers.setting)[None],
    )


def _innings_so_far(innings: Innings, state: InningsState, table: Table) -> NDArray[np.float32]:
    """Before each ball: log(seen / expected) of each outcome in this innings, shrunk to 0 at its start."""
    outcomes = np.array([ball.outcome for ball in innings.deliveries])
    seen, expected = np.eye(NUM_OUTCOMES)[outcomes], table.probabilities[state.cells]
    usual = _INNINGS_SHRINKAGE * table.base
    before = [np.cumsum(each, axis=0) - each + usual for each in (seen, expected)]
    return np.asarray(2 * np.log(before[0] / before[1]), np.float32)


def _result(ball: Delivery) -> int:
    if ball.outcome == 0 and (ball.is_wide or ball.is_no_ball):
        return _WIDE if ball.is_wide else _NO_BALL
    return ball.outcome


_HOLD_OUT_EVERY = 5  # every fifth training match is used to choose the table's smoothing


class League(NamedTuple):
    """The training and test sets, and what they were prepared with."""

    train: list[InningsRecord]
    test: list[InningsRecord]
    table: Table
    num_players: int  # known from training


class _Described(NamedTuple):
    match: Match
    states: list[InningsState]  # of each innings


def make_league(matches: Sequence[Match], rule: SplitRule, share: float, evaluate_on: str) -> League:
    """Prepare matches, which are sorted by date. For validation, drop the test matches and hold out others instead."""
    split = split_matches(matches, rule, share, "test")
    if evaluate_on == "validation":
        split = split_matches(split.train, rule, share, "validation")
    train, test = ([_described(match) for match in part] for part in split)
    table = _fit_table_model(train)
    identities = _identities(split.train)
    # Training sees nothing of the test matches; careers in a test match include everything before its day.
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
    states = [
        describe_innings(each, _stage(each, number), match.balls_per_over) for number, each in enumerate(match.innings)
    ]
    return _Described(match, states)


def _stage(innings: Innings, number: int) -> int:
    return 2 if innings.is_super_over else min(number, 1)


def _fit_table_model(train: Sequence[_Described]) -> Table:
    """Fit the table model. Its smoothing is chosen on every fifth match, with a table fitted to the others."""
    held_out = train[::_HOLD_OUT_EVERY]
    rest = [each for number, each in enumerate(train) if number % _HOLD_OUT_EVERY] or train
    return fit_table(_balls(train), _balls(held_out), _balls(rest))


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
    """Number everybody who batted or bowled in training, from 1; 0 means unknown."""
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
        innings_record(match.name, innings, state, careers[match.name, number], table, identities)
        for match, states in matches
        for number, (innings, state) in enumerate(zip(match.innings, states, strict=True))
        if innings.deliveries
    ]
