"""Check a script's arguments: each failure is one line with the name and the value."""

import difflib
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from lockstep.errors import UserError

MAX_WORKERS = 256  # processes per rank that load samples: no machine has use for more


def require_count(name: str, value: Any) -> None:
    """Refuse anything but a whole number greater than 0."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name}={value!r}: expected a whole number greater than 0")


def require_whole(name: str, value: Any, *, otherwise: str = "") -> None:
    """Refuse anything but a whole number, 0 or greater; `otherwise` ends the message: ", or …"."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise UserError(f"{name}={value!r}: expected a whole number of at least 0{otherwise}")


def as_whole(name: str, value: Any) -> int:
    """Return a whole number, 0 or greater, as an int: 1e4 and numpy's numbers are accepted."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not value >= 0 or value % 1 != 0:
        raise UserError(f"{name}={value!r}: expected a whole number of at least 0")
    return int(value)


def require_positive(name: str, value: Any, *, otherwise: str = "") -> None:
    """Refuse anything but a number greater than 0; `otherwise` ends the message: ", or …"."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise UserError(f"{name}={value!r}: expected a number greater than 0{otherwise}")


def require_fraction(name: str, value: Any) -> None:
    """Refuse anything but a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise UserError(f"{name}={value!r}: expected a number from 0 to 1")


def require_flag(name: str, value: Any) -> None:
    """Refuse anything but True or False."""
    if not isinstance(value, bool):
        raise UserError(f"{name}={value!r}: expected True or False")


def require_known(what: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Refuse a name that is not among `known`, with the nearest one as a suggestion.

    Args:
        what: how the message begins, as in "fsdp has no option".
        given: the names to check.
        known: the valid names.
    """
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(str(name), known, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else f": expected {', '.join(known)}"
            raise UserError(f"{what} {name}{hint}")
