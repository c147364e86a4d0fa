"""Numbers with their nouns, in the singular or the plural: `1 step`, `2 processes`, `ranks 0, 2`."""

from collections.abc import Collection


def count_noun(num: int, noun: str) -> str:
    """Return `1 step`, `1,234 steps`, `2 processes`."""
    return f"{num:,} {_inflect(noun, num)}"


def number_noun(noun: str, numbers: Collection[int]) -> str:
    """Return `rank 2`, or `ranks 0, 2`: the things that have these numbers."""
    return f"{_inflect(noun, len(numbers))} {', '.join(map(str, numbers))}"


def _inflect(noun: str, num: int) -> str:
    if num == 1:
        return noun
    return noun + ("es" if noun.endswith(("s", "tch")) else "s")
