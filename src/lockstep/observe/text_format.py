"""Format numbers, durations, sizes and tables for people; make untrusted text safe to print."""

from collections.abc import Sequence
from typing import Any

from lockstep.terminal_text import escape_controls

_MAX_CHARS = 300


def one_line(value: Any, max_chars: int = _MAX_CHARS) -> str:
    """Return an untrusted value as one line of bounded length, with its control characters escaped."""
    text = str(value) if isinstance(value, str | int | float) else type(value).__name__
    cut = text[:max_chars] + "…" * (len(text) > max_chars)
    return escape_controls(" ".join(cut.split()))


def several_lines(text: str, max_chars: int, max_lines: int) -> list[str]:
    """Return the beginning of an untrusted text as lines; the last line is `…` if there is more."""
    lines = [one_line(line, 500) for line in text[:max_chars].splitlines()]
    is_cut = len(text) > max_chars or len(lines) > max_lines
    return lines[:max_lines] + ["…"] * is_cut


def format_number(value: float) -> str:
    """Format with four significant digits, and without an exponent for everyday sizes."""
    if abs(value) < 1e9 and (value == int(value) or abs(value) >= 1e4):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def format_seconds(value_s: float) -> str:
    """Format a short time: `1.25 s`, `12.0 ms`, `48 µs`."""
    if value_s >= 100:
        return f"{value_s:,.0f} s"
    if value_s >= 0.9995:
        return f"{value_s:.2f} s"
    return f"{1e3 * value_s:.1f} ms" if value_s >= 0.00095 else f"{1e6 * value_s:.0f} µs"


def format_duration(value_s: float) -> str:
    """Format the time that a run takes: `2 h 05 min`."""
    if value_s < 60:
        return f"{value_s:.0f} s"
    minutes, rest_s = divmod(int(value_s), 60)
    if minutes < 60:
        return f"{minutes} min {rest_s:02d} s"
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def format_bytes(num_bytes: float) -> str:
    """Format a size: `964 bytes`, `5.0 kB`, `1.8 MB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"


def format_percent(fraction: float) -> str:
    """Format 0.25 as `25%`."""
    return f"{fraction:.0%}"


def format_table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Align columns: the first one left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]).rstrip())
    return lines
