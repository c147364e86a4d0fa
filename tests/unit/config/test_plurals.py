"""Numbers with their nouns: one thing in the singular, none or several in the plural."""

import pytest

from lockstep.config.plurals import count_noun, number_noun


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (count_noun(1, "step"), "1 step"),
        (count_noun(0, "step"), "0 steps"),
        (count_noun(1234, "process"), "1,234 processes"),
        (count_noun(2, "batch"), "2 batches"),
        (count_noun(2, "epoch"), "2 epochs"),
        (number_noun("rank", [3]), "rank 3"),
        (number_noun("process", [0, 2]), "processes 0, 2"),
    ],
)
def test_the_noun_agrees_with_the_number(shown: str, expected: str) -> None:
    assert shown == expected
