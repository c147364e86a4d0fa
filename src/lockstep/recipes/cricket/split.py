"""Which matches are for training and which for the test: always whole matches, the same on every machine."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from lockstep.errors import UserError
from lockstep.recipes.cricket.match import Match
from lockstep.world.randomness import key_of

Rule = Literal["match", "date"]

_FINE = 10_000


class MatchSplit(NamedTuple):
    train: list[Match]  # by date, as they came
    test: list[Match]


def split_matches(matches: Sequence[Match], rule: Rule, share: float, purpose: str) -> MatchSplit:
    """Hold out about this share: by a hash of the match's name, or the latest, by date.

    `purpose` keys the hash, so that two splits for different purposes have nothing to do with each other.
    """
    if rule == "match":
        chosen = {match.name for match in matches if key_of(0, purpose, match.name) % _FINE < share * _FINE}
    else:
        first_day = matches[min(int(len(matches) * (1 - share)), len(matches) - 1)].date
        chosen = {match.name for match in matches if match.date >= first_day}
    split = MatchSplit(
        [match for match in matches if match.name not in chosen], [match for match in matches if match.name in chosen]
    )
    if not all(any(innings.deliveries for match in part for innings in match.innings) for part in split):
        raise UserError(
            f"data.split={rule}: {len(split.train)} matches for training and {len(split.test)} for the {purpose}: "
            "both need some with balls bowled; give more matches"
        )
    return split
