"""Synthetic matches in Cricsheet's JSON, used when no data is given.

Teams and players are invented, and their names say so. Batters differ in how hard they hit and how rarely they get out,
bowlers in what they concede; batters settle in, hit out in the last overs, and chase targets. So there is more to learn
than over and wickets. They are data: match number i is always the same, whatever the run's seed.
"""

import json
from collections.abc import Iterator
from datetime import date, timedelta
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.recipes.cricket.cricsheet import read_match
from lockstep.recipes.cricket.match import Match
from lockstep.recipes.cricket.match_files import MatchFile
from lockstep.world.keyed_random import key_of

_NUM_TEAMS = 8
_NUM_PLAYERS = 11
_NUM_BOWLERS = 6
_OVERS = 20
_WIDES, _NO_BALLS = 0.035, 0.005
_RUNS = (0, 1, 2, 3, 4, 6, 0)  # of each outcome; the last is a wicket
_BASE_LOGITS = np.log([0.40, 0.34, 0.07, 0.005, 0.095, 0.04, 0.05])
# Changes of the log-odds of outcomes for a hitter, a safe batter, an economical bowler and a hurried batter.
_HITTING = np.array([-0.1, -0.2, 0.0, 0.0, 0.6, 1.0, 0.3])
_SAFETY = np.array([0.0, 0.15, 0.1, 0.0, 0.0, -0.1, -1.0])
_ECONOMY = np.array([0.5, 0.0, -0.2, -0.2, -0.6, -0.7, 0.4])
_HURRY = np.array([-0.4, 0.1, 0.2, 0.0, 0.2, 0.6, 0.4])


def synthetic_matches(count: int) -> list[Match]:
    """Return synthetic matches by date, read like real ones."""
    return [
        read_match(MatchFile(name, f"the synthetic match {name}", json.dumps(content).encode()))
        for name, content in synthetic_contents(count)
    ]


def synthetic_contents(count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each match and the content of its file."""
    teams = [_Team(number) for number in range(_NUM_TEAMS)]
    for number in range(count):
        yield f"synthetic-{number:05}", _MatchSimulation(number, teams).content()


class _Team:
    def __init__(self, number: int) -> None:
        draw = np.random.default_rng(key_of(0, "synthetic team", number))
        self.name = f"Synthetic Team {number + 1}"
        self.players = [f"Synthetic Player {number + 1}-{place + 1}" for place in range(_NUM_PLAYERS)]
        # The batting order follows skill, roughly.
        skill = np.linspace(0.6, -0.9, _NUM_PLAYERS)
        self.hitting = skill / 2 + draw.normal(0, 0.6, _NUM_PLAYERS)
        self.safety = skill + draw.normal(0, 0.4, _NUM_PLAYERS)
        self.economy = draw.normal(0, 0.5, _NUM_PLAYERS)


class _MatchSimulation:
    """One match, ball by ball."""

    def __init__(self, number: int, teams: list[_Team]) -> None:
        self._draw = np.random.default_rng(key_of(0, "synthetic match", number))
        first, second = self._draw.permutation(_NUM_TEAMS)[:2]
        self._sides = (teams[first], teams[second])
        self._date = date(2020, 1, 1) + timedelta(days=number)

    def content(self) -> dict[str, Any]:
        first, second = self._sides
        opening = self._innings(first, second, None)
        target = 1 + _runs_of(opening)
        chase = self._innings(second, first, target)
        people = {name: f"id {name}" for team in self._sides for name in team.players}
        return {
            "meta": {"data_version": "1.1.0", "created": self._date.isoformat(), "revision": 1},
            "info": {
                "balls_per_over": 6,
                "dates": [self._date.isoformat()],
                "event": {"name": "Synthetic matches: nobody played them"},
                "match_type": "T20",
                "overs": _OVERS,
                "players": {team.name: team.players for team in self._sides},
                "registry": {"people": people},
                "teams": [first.name, second.name],
                "venue": "Synthetic Ground",
            },
            "innings": [opening, chase | {"target": {"overs": _OVERS, "runs": target}}],
        }

    def _innings(self, batting: _Team, bowling: _Team, target: int | None) -> dict[str, Any]:
        at_bat, out, runs = [0, 1], 0, 0  # at_bat: the striker first
        faced = [0] * _NUM_PLAYERS
        overs = []
        bowler = -1
        for over in range(_OVERS):
            bowler = self._next_bowler(bowler)
            deliveries: list[dict[str, Any]] = []
            legal = 0
            while legal < 6 and out < _NUM_PLAYERS - 1 and (target is None or runs < target):
                hurry = self._hurry(over, runs, target)
                scores = _scores(batting, bowling, at_bat[0], bowler, faced[at_bat[0]], hurry)
                delivery = self._ball(batting, bowling, at_bat, bowler, scores)
                deliveries.append(delivery)
                runs += delivery["runs"]["total"]
                legal += "extras" not in delivery
                faced[at_bat[0]] += 1
                if "wickets" in delivery:
                    out += 1
                    at_bat[0] = out + 1
                elif delivery["runs"]["batter"] % 2:
                    at_bat.reverse()
            at_bat.reverse()
            if deliveries:
                overs.append({"over": over, "deliveries": deliveries})
        return {"team": batting.name, "overs": overs}

    def _next_bowler(self, last: int) -> int:
        choice = [place for place in range(_NUM_PLAYERS - _NUM_BOWLERS, _NUM_PLAYERS) if place != last]
        return int(self._draw.choice(choice))

    def _hurry(self, over: int, runs: int, target: int | None) -> float:
        late = max(over - 13, 0) / 6
        if target is None:
            return late
        return float(np.clip((target - runs) / (6 * (_OVERS - over)) - 1.3, -1, 2)) + late / 2

    def _ball(
        self, batting: _Team, bowling: _Team, at_bat: list[int], bowler: int, scores: NDArray[np.float64]
    ) -> dict[str, Any]:
        striker = batting.players[at_bat[0]]
        # After the last batter there is no partner: the innings is over.
        partner = batting.players[min(at_bat[1], _NUM_PLAYERS - 1)]
        ball: dict[str, Any] = {"batter": striker, "bowler": bowling.players[bowler], "non_striker": partner}
        chance = self._draw.random()
        if chance < _WIDES + _NO_BALLS:
            kind = "wides" if chance < _WIDES else "noballs"
            return ball | {"runs": {"batter": 0, "extras": 1, "total": 1}, "extras": {kind: 1}}
        weights = np.exp(scores)
        outcome = int(self._draw.choice(len(_RUNS), p=weights / weights.sum()))
        runs = _RUNS[outcome]
        ball["runs"] = {"batter": runs, "extras": 0, "total": runs}
        if outcome == len(_RUNS) - 1:
            ball["wickets"] = [{"kind": "bowled", "player_out": striker}]
        return ball


def _scores(batting: _Team, bowling: _Team, batter: int, bowler: int, faced: int, hurry: float) -> NDArray[np.float64]:
    settled = min(faced, 24) / 24 - 0.5
    return np.asarray(
        _BASE_LOGITS
        + (batting.hitting[batter] + 0.5 * settled) * _HITTING
        + (batting.safety[batter] + 0.6 * settled) * _SAFETY
        + bowling.economy[bowler] * _ECONOMY
        + hurry * _HURRY
    )


def _runs_of(innings: dict[str, Any]) -> int:
    return sum(ball["runs"]["total"] for over in innings["overs"] for ball in over["deliveries"])
