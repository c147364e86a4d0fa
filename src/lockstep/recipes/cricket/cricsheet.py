"""Read matches from Cricsheet's JSON (versions 1.0 and 1.1); errors name the file and the record."""

import json
from collections.abc import Iterator
from datetime import date
from typing import Any

from lockstep.errors import UserError
from lockstep.recipes.cricket.match import Delivery, Innings, Match, outcome_of
from lockstep.recipes.cricket.match_files import MatchFile, read_match_files

_EXTRAS = {"byes", "legbyes", "noballs", "penalty", "wides"}
_MAX_RUNS = 30  # off one ball, with all extras
_MAX_OVERS = 1_000  # of an innings
_MAX_BALLS = 60  # of an over
_MAX_INNINGS = 40
_SHORT = {"T20": 20, "IT20": 20}  # overs of an innings by type of match; a few files wrongly say 50
_USUAL_BALLS = 6  # of an over
_USUAL_POWERPLAY = 6  # overs


def read_matches(path: str) -> list[Match]:
    """Return all matches of an archive, a folder or a file, sorted by date."""
    matches = sorted(map(read_match, read_match_files(path)), key=lambda match: (match.date, match.name))
    if not any(innings.deliveries for match in matches for innings in match.innings):
        raise UserError(f"data.path={path}: no ball was bowled in any of the {len(matches)} matches")
    names: set[str] = set()
    for match in matches:
        if match.name in names:
            raise UserError(f"data.path={path}: the match {match.name} occurs twice")
        names.add(match.name)
    return matches


def read_match(file: MatchFile) -> Match:
    """Parse and check one match file."""
    try:
        content = json.loads(file.text)
    except RecursionError:
        raise UserError(f"{file.place}: not a match file: nested too deeply") from None
    except ValueError as error:  # also invalid UTF-8, and numbers with thousands of digits
        raise UserError(f"{file.place}: not JSON: {error}") from None
    return _MatchReader(file).match(content)


class _MatchReader:
    """Reads the content of one match. `_place` says where it is, for error messages."""

    def __init__(self, file: MatchFile) -> None:
        self._file = file
        self._place = ""
        self._people: dict[str, str] = {}
        self._balls_per_over = _USUAL_BALLS

    def match(self, content: Any) -> Match:
        info = self._field(self._checked(content, dict, "the file"), "info", dict)
        self._place = "info: "
        people = self._field(self._field(info, "registry", dict), "people", dict)
        self._people = {name: self._checked(known, str, f"the id of {name!r}") for name, known in people.items()}
        teams = self._list_of_names(info, "teams")
        if len(teams) != 2:
            raise self._fault(f"teams: expected two, got {len(teams)}")
        self._balls_per_over = self._count(info, "balls_per_over", 1, _MAX_BALLS, _USUAL_BALLS)
        day = self._day(info)
        venue = self._checked(info.get("venue", ""), str, "venue")
        kind = self._checked(info.get("match_type", ""), str, "match_type")
        overs = min(self._count(info, "overs", 1, _MAX_OVERS, _MAX_OVERS), _SHORT.get(kind, _MAX_OVERS))
        self._place = ""
        listed = self._field(content, "innings", list)
        if len(listed) > _MAX_INNINGS:
            raise self._fault(f"innings: expected at most {_MAX_INNINGS}, got {len(listed)}")
        innings = tuple(self._innings(each, number, teams, overs) for number, each in enumerate(listed, 1))
        return Match(self._file.name, day, venue, self._balls_per_over, innings)

    def _innings(self, value: Any, number: int, teams: list[str], overs: int) -> Innings:
        self._place = f"innings {number}: "
        record = self._checked(value, dict, "an innings")
        team = self._field(record, "team", str)
        if team not in teams:
            raise self._fault(f"team {team!r} is not one of {' and '.join(map(repr, teams))}")
        target, max_overs = self._target(record, overs)
        is_forfeited = record.get("forfeited") is True
        listed = record.get("overs", []) if is_forfeited else self._field(record, "overs", list)
        if len(listed) > _MAX_OVERS:
            raise self._fault(f"overs: expected at most {_MAX_OVERS:,}, got {len(listed):,}")
        powerplay = self._powerplay(record)
        deliveries = tuple(
            ball for position, each in enumerate(listed, 1) for ball in self._over(each, number, position)
        )
        opponent = teams[1] if team == teams[0] else teams[0]
        return Innings(team, opponent, record.get("super_over") is True, target, max_overs, powerplay, deliveries)

    def _target(self, innings: dict[str, Any], overs: int) -> tuple[int | None, float]:
        if "target" not in innings:
            return None, overs
        target = self._field(innings, "target", dict)
        allowed = target.get("overs", overs)
        if isinstance(allowed, bool) or not isinstance(allowed, int | float) or not 0 < allowed <= _MAX_OVERS:
            raise self._fault(f"target: overs: expected a number of overs, got {allowed!r}")
        runs = self._count(target, "runs", 0, 10_000, None) if "runs" in target else None
        return runs, float(allowed)

    def _powerplay(self, innings: dict[str, Any]) -> int:
        """Count the overs with fielding restrictions at the start; `to: 5.6` in a file is an over and a ball."""
        last = 0
        for each in self._checked(innings.get("powerplays", []), list, "powerplays"):
            record = self._checked(each, dict, "powerplays: an entry")
            begin, end = record.get("from"), record.get("to")
            if not (isinstance(begin, int | float) and isinstance(end, int | float) and 0 <= begin <= _MAX_OVERS):
                raise self._fault(f"powerplays: from {begin!r} to {end!r}: expected over and ball, such as 5.6")
            if begin < 1 and 0 <= end <= _MAX_OVERS:
                last = max(last, int(end) + 1)
        return last or _USUAL_POWERPLAY

    def _over(self, value: Any, innings: int, position: int) -> Iterator[Delivery]:
        self._place = f"innings {innings}, over entry {position}: "
        record = self._checked(value, dict, "an over")
        over = self._count(record, "over", 0, _MAX_OVERS, None)
        deliveries = self._field(record, "deliveries", list)
        if len(deliveries) > _MAX_BALLS:
            raise self._fault(f"deliveries: expected at most {_MAX_BALLS}, got {len(deliveries)}")
        for number, each in enumerate(deliveries, 1):
            self._place = f"innings {innings}, over {over}, delivery {number}: "
            yield self._delivery(each, over)

    def _delivery(self, value: Any, over: int) -> Delivery:
        record = self._checked(value, dict, "a delivery")
        runs = self._field(record, "runs", dict)
        off_bat, extra, total = (self._count(runs, kind, 0, _MAX_RUNS, None) for kind in ("batter", "extras", "total"))
        if total != off_bat + extra:
            raise self._fault(f"runs: {off_bat} off the bat and {extra} extras are not {total} in total")
        extras = self._extras(record)
        out = self._out(record)
        batter, non_striker, bowler = (self._person(record, role) for role in ("batter", "non_striker", "bowler"))
        return Delivery(
            over=over,
            batter=batter,
            non_striker=non_striker,
            bowler=bowler,
            runs=off_bat,
            total=total,
            is_wide="wides" in extras,
            is_no_ball="noballs" in extras,
            out=out,
            outcome=outcome_of(off_bat, bool(out)),
        )

    def _extras(self, delivery: dict[str, Any]) -> dict[str, Any]:
        if "extras" not in delivery:
            return {}
        extras: dict[str, Any] = self._field(delivery, "extras", dict)
        for kind in extras:
            if kind not in _EXTRAS:
                raise self._fault(f"extras: {kind!r} is not one of {', '.join(sorted(_EXTRAS))}")
            self._count(extras, kind, 0, _MAX_RUNS, None)
        return extras

    def _out(self, delivery: dict[str, Any]) -> tuple[str, ...]:
        if "wickets" not in delivery:
            return ()
        out = []
        for each in self._field(delivery, "wickets", list):
            wicket = self._checked(each, dict, "wickets: an entry")
            self._field(wicket, "kind", str)
            out.append(self._person(wicket, "player_out"))
        if not out:
            raise self._fault("wickets: expected the players out, got an empty list")
        return tuple(out)

    def _person(self, record: dict[str, Any], role: str) -> str:
        name = self._field(record, role, str)
        known = self._people.get(name)
        if known is None:
            raise self._fault(f"{role}: {name!r} has no id in info.registry.people")
        return known

    def _day(self, info: dict[str, Any]) -> str:
        days = self._list_of_names(info, "dates")
        try:
            return date.fromisoformat(days[0]).isoformat()
        except (ValueError, IndexError):
            raise self._fault(f"dates: expected dates such as 2016-06-20, got {days!r:.60}") from None

    def _list_of_names(self, record: dict[str, Any], name: str) -> list[str]:
        return [self._checked(each, str, f"{name}: an entry") for each in self._field(record, name, list)]

    def _count(self, record: dict[str, Any], name: str, least: int, most: int, default: int | None) -> int:
        value = record.get(name, default)
        if type(value) is not int:  # not isinstance, because True is an int
            raise self._fault(f"{name}: {_expected(int, value, name in record)}")
        if not least <= value <= most:
            raise self._fault(f"{name}: expected {least} to {most}, got {value}")
        return value

    def _field(self, record: dict[str, Any], name: str, kind: type[Any]) -> Any:
        value = record.get(name)
        if type(value) is not kind:
            raise self._fault(f"{name}: {_expected(kind, value, name in record)}")
        return value

    def _checked(self, value: Any, kind: type[Any], what: str) -> Any:
        if type(value) is not kind:
            raise self._fault(f"{what}: {_expected(kind, value, True)}")
        return value

    def _fault(self, what: str) -> UserError:
        return UserError(f"{self._file.place}: {self._place}{what}")


_KINDS = {dict: "an object", list: "a list", str: "a string", int: "a whole number"}


def _expected(kind: type[Any], value: Any, is_there: bool) -> str:
    return f"expected {_KINDS[kind]}, got {value!r:.60}" if is_there else f"expected {_KINDS[kind]}, but it is missing"
