"""Innings as tensors: all that their graphs are made of."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.recipes.cricket.careers import InningsCareers
from lockstep.recipes.cricket.match import NUM_OUTCOMES, Delivery, Innings
from lockstep.recipes.cricket.state import NUM_NUMBERS, InningsState
from lockstep.recipes.cricket.table import Table

ROLES = ("batter", "non_striker", "bowler")
NUM_INPUTS = NUM_NUMBERS + NUM_OUTCOMES  # of a ball: the state, and how the innings has gone
NUM_RESULTS = NUM_OUTCOMES + 2  # the outcomes, a wide, a no-ball

_YOUNG = 30.0  # balls that count as usual
_WIDE, _NO_BALL = NUM_OUTCOMES, NUM_OUTCOMES + 1


class InningsRecord(NamedTuple):
    match: str
    numbers: Tensor  # (balls, …)
    overs: Tensor  # (balls)
    cells: Tensor  # (balls)
    outcomes: Tensor  # (balls)
    results: Tensor  # (balls): what later balls are told
    players: Tensor  # (roles, balls): places in the two below
    identities: Tensor  # (players); 0: unknown
    figures: Tensor  # (players, …)
    setting: Tensor  # (1, …)


def record(
    match: str,
    innings: Innings,
    state: InningsState,
    careers: InningsCareers,
    table: Table,
    identities: Mapping[str, int],
) -> InningsRecord:
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
    """Before each ball: log(seen / expected) of each outcome in this innings, leaning to 0 while it is young."""
    outcomes = np.array([ball.outcome for ball in innings.deliveries])
    seen, expected = np.eye(NUM_OUTCOMES)[outcomes], table.chances[state.cells]
    usual = _YOUNG * table.base
    before = [np.cumsum(each, axis=0) - each + usual for each in (seen, expected)]
    return np.asarray(2 * np.log(before[0] / before[1]), np.float32)


def _result(ball: Delivery) -> int:
    if ball.outcome == 0 and (ball.is_wide or ball.is_no_ball):
        return _WIDE if ball.is_wide else _NO_BALL
    return ball.outcome
