"""Quantities and strangers' texts as people read them."""

from collections.abc import Sequence
from typing import Any

_MOST_CHARACTERS = 300


def one_line(value: Any, most: int = _MOST_CHARACTERS) -> str:
    """Something that a stranger may have written: on one line of bounded length, without control characters."""
    text = str(value) if isinstance(value, str | int | float) else type(value).__name__
    cut = text[:most] + "…" * (len(text) > most)
    return "".join(character if character.isprintable() else "�" for character in " ".join(cut.split()))


def several_lines(text: str, most_characters: int, most_lines: int) -> list[str]:
    """Of a longer text the beginning, and a line that says so."""
    lines = [one_line(line, 500) for line in text[:most_characters].splitlines()]
    is_cut = len(text) > most_characters or len(lines) > most_lines
    return lines[:most_lines] + ["…"] * is_cut


def number(value: float) -> str:
    """Four digits that matter, and no exponent for numbers of everyday sizes."""
    if abs(value) < 1e9 and (value == int(value) or abs(value) >= 1e4):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def seconds(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 0.9995:
        return f"{value:.2f} s"
    return f"{1e3 * value:.1f} ms" if value >= 0.00095 else f"{1e6 * value:.0f} µs"


def duration(value: float) -> str:
    """Of a run: `2 h 05 min`."""
    if value < 60:
        return f"{value:.0f} s"
    minutes, rest = divmod(int(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def size(num_bytes: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def times(num: int, noun: str) -> str:
    """`1 step`, `1,234 steps`, `2 processes`."""
    ending = "" if num == 1 else "es" if noun.endswith("s") else "s"
    return f"{num:,} {noun}{ending}"


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns side by side; the first to the left, the others, which are numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return lines
