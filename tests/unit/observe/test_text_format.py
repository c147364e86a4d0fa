"""Numbers, times, sizes and tables as people read them; untrusted text on one line."""

import pytest

from lockstep.observe.text_format import (
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    format_seconds,
    format_table,
    one_line,
    several_lines,
)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_number(1118.49), "1118"),
        (format_number(12345.6), "12,346"),
        (format_number(0.123456), "0.1235"),
        (format_seconds(0.0000479), "48 µs"),
        (format_seconds(0.0425), "42.5 ms"),
        (format_seconds(0.9999), "1.00 s"),
        (format_duration(59), "59 s"),
        (format_duration(7500), "2 h 05 min"),
        (format_bytes(964), "964 bytes"),
        (format_bytes(1_800_000), "1.8 MB"),
        (format_percent(0.25), "25%"),
    ],
)
def test_quantities(shown: str, expected: str) -> None:
    assert shown == expected


def test_untrusted_text_is_one_printable_line() -> None:
    assert one_line("a\x1b[2J\n b") == "a\\x1b[2J b"
    joined = "👩‍🔬 می‌خواهم"  # with the joiners that these need
    assert one_line(joined) == joined
    assert one_line("x" * 10, 4) == "xxxx…"
    assert one_line([1, 2]) == "list"
    assert several_lines("a\nb\nc", 100, 2) == ["a", "b", "…"]


def test_columns_are_aligned() -> None:
    assert format_table([("run", "n"), ("a", "100")]) == ["run    n", "a    100"]
