"""Compare the rows that two jobs were given for an update: the same, padded to other lengths, or rounded."""

from collections import Counter
from collections.abc import Iterable, Sequence

from lockstep.supervision.batch_rows import RecordedRow

# Relative to the largest row: rows that another model has computed differ by this much at most.
_ROUNDED = 1e-3
_MAX_PADDINGS = 4  # values that may be padding, of which each is tried


def are_alike(one: Sequence[RecordedRow], many: Sequence[RecordedRow]) -> bool:
    """Are these the same rows, in any order, but for padding or rounding?"""
    return differ_only_by_rounding(one, many) or differ_only_in_padding(one, many)


def differ_only_in_padding(one: Sequence[RecordedRow], many: Sequence[RecordedRow]) -> bool:
    """Are these the same rows once the value they are padded with, whatever it is, is off their ends?"""
    if len(one) != len(many):
        return False
    tails = _most_frequent(row.tail for row in (*one, *many))
    heads = _most_frequent(row.head for row in (*one, *many))
    return any(_without_tails(one, value) == _without_tails(many, value) for value in tails) or any(
        _without_heads(one, value) == _without_heads(many, value) for value in heads
    )


def differ_only_by_rounding(one: Sequence[RecordedRow], many: Sequence[RecordedRow]) -> bool:
    """Are these the same rows of numbers, but for rounding: the output of another model, for example?"""
    largest = max((row.norm for row in (*one, *many)), default=0.0)
    pairs = zip(sorted(row.projection for row in one), sorted(row.projection for row in many), strict=False)
    return len(one) == len(many) and largest > 0 and all(abs(a - b) <= _ROUNDED * largest for a, b in pairs)


def _most_frequent(values: Iterable[str]) -> list[str]:
    """Return the likeliest values to be padding: shorter rows have it at their ends."""
    return [value for value, _ in Counter(filter(None, values)).most_common(_MAX_PADDINGS)]


def _without_tails(rows: Sequence[RecordedRow], value: str) -> Counter[str]:
    return Counter(row.without_tail if row.tail == value else row.digest for row in rows)


def _without_heads(rows: Sequence[RecordedRow], value: str) -> Counter[str]:
    return Counter(row.without_head if row.head == value else row.digest for row in rows)
