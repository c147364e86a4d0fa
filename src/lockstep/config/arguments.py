"""Checks of what a script hands over, which no schema has read: each failure is one line that names the value."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from lockstep.errors import UserError


def require_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={value!r}: expected a whole number greater than 0")


def require_positive(name: str, value: Any, *, otherwise: str = "") -> None:
    """`otherwise`: what else it may be, for the message."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UserError(f"{name}={value!r}: expected a number greater than 0{otherwise}")


def require_share(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"{name}={value!r}: expected a share from 0 to 1")


def require_whole(name: str, value: Any, *, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{name}={value!r}: expected a whole number from 0{otherwise}")


def require_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise UserError(f"{name}={value!r}: expected True or False")


def require_known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """`what`: in words, as in "fsdp has no option"."""
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else f": expected {', '.join(known)}"
            raise UserError(f"{what} {name}{hint}")
