"""What the table comes to, in a few plain sentences, whoever they favour."""

from collections.abc import Sequence
from typing import NamedTuple

from lockstep.benchmark.catalogue import AGAIN, HAND_WRITTEN
from lockstep.benchmark.comparison import Row


class Verdict(NamedTuple):
    lines: list[str]
    is_kept: bool  # lockstep's promise: the same bits on any number of processes


def judge(rows: Sequence[Row], processes: int, room: int, room_words: str) -> Verdict:
    """`room`: how many processes this machine has cores or GPUs for, and which, in words."""
    lines = [line for size in (1, processes) if (line := _cost(rows, size)) is not None]
    if processes > room:
        lines.append(
            f"{processes} processes share {room} {room_words} here: what a step takes on {processes} says little."
        )
    exact = [row for row in rows if row.is_exact]
    broken = [row for row in exact if row.answer is not None and not row.answer.is_same]
    failed = [row for row in exact if row.failure is not None]
    return Verdict([*lines, *_bits(rows, exact, broken, processes)], not broken and not failed)


def _cost(rows: Sequence[Row], size: int) -> str | None:
    """Of a step of lockstep's with the fewest lanes, which is the like of what is written by hand."""
    measured = [row for row in rows if row.is_exact and size in row.times]
    again = next((row for row in rows if row.entry.name == AGAIN and size in row.times), None)
    if not measured or again is None:
        return None
    least, most = measured[0], measured[-1]
    taken, noise = least.times[size].ratio, again.times[size].ratio.noise
    spread = f"×{taken.median:.2f}, by round {taken.low:.2f}–{taken.high:.2f}"
    more = "" if most is least else f"; with {_lanes(most)} ×{most.times[size].ratio.median:.2f}"
    cost = f"takes {_amount(taken.difference)} hand-written ({spread}){more}"
    line = f"{_place(size)}, a step of lockstep with {_lanes(least)} {cost}"
    if abs(taken.difference) > max(noise, taken.wobble):
        return f"{line}."
    doubt = f"by round it varies by {taken.wobble:.0%}, and hand-written against itself is off by {noise:.0%}"
    return f"{line}. Too noisy here to tell: {doubt}."


def _bits(rows: Sequence[Row], exact: Sequence[Row], broken: Sequence[Row], processes: int) -> list[str]:
    if broken:
        worst = max(broken, key=lambda row: row.answer.difference if row.answer else 0.0)
        assert worst.answer is not None
        return [
            f"LOCKSTEP'S OWN BITS DIFFER between one process and {processes}: {worst.entry.title}, by up to "
            f"{worst.answer.difference:.2g}. That is a defect; please report it with what --json prints."
        ]
    if not any(row.answer is not None for row in exact):
        return []
    by_hand = next((row.answer for row in rows if row.entry.name == HAND_WRITTEN), None)
    other = (
        "" if by_hand is None or by_hand.is_same else f"; hand-written, the weights end {by_hand.difference:.2g} apart"
    )
    return [f"On one process and on {processes}, lockstep computes the same bits{other}."]


def _place(size: int) -> str:
    return "On one process" if size == 1 else f"On {size} processes"


def _lanes(row: Row) -> str:
    return f"{row.entry.lanes} lane{'s' * (row.entry.lanes != 1)}"


def _amount(difference: float) -> str:
    if abs(difference) < 0.005:
        return "as long as"
    if difference >= 1.0:
        return f"{1.0 + difference:.1f} times as long as"
    return f"{abs(difference):.0%} {'longer' if difference > 0 else 'less'} than"
