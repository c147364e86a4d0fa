"""Was every sample used once? From the stretches that commits list to the samples that they stand for.

A loader's turn is a run of batches. Of each epoch in it, every position that those batches reach must be consumed or
dropped once, in the order of the batches; and the epoch's order must lead from so many positions to as many samples.
Positions are compared as intervals and samples marked in a bitmap, so memory stays small whatever a ledger says.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.lineage import Commit, Faults, Span, Stretch, shown
from lockstep.data.cut import Cut, Tail
from lockstep.data.order import ORDER_VERSION, Order

_MAX_LENGTH = 2**31
_CHUNK = 2**16  # positions at once
_MOST_NAMED = 10

Tell = Callable[[str], None]


class Partial(NamedTuple):
    """An epoch that the turn has only a part of: it is not over yet, or another loader had its turn before or after."""

    epoch: int
    start: int  # position
    stop: int


class Turn(NamedTuple):
    """One loader's batches, one after the other, and what can be said of them."""

    kind: str
    batches: range
    num_samples: int = 0  # of the data set, if it has a number of them
    num_dropped: int = 0  # of each epoch
    num_finished: int = 0  # epochs of which every sample was used once or dropped
    partial: tuple[Partial, ...] = ()

    def __str__(self) -> str:
        if self.kind == "stream":
            return f"batches {self._span} of a stream, each once: its samples have no numbers that could be compared"
        if self.kind != "indexed":
            return f"batches {self._span} of a loader that does not say which samples it took: nothing can be proven"
        words = []
        if self.num_finished:
            dropped = f" or dropped ({self.num_dropped:,} per epoch)" if self.num_dropped else ""
            epochs = _count(self.num_finished, "finished epoch")
            words.append(f"{epochs}: each of {self.num_samples:,} samples exactly once{dropped}")
        for epoch, start, stop in self.partial:
            percent = 100 * (stop - start) // self.num_samples
            part = f"{percent}%" if percent else "less than 1%"
            words.append(f"{part} of epoch {epoch + 1:,}" + (f", from position {start:,} on" if start else ""))
        return "; ".join(words) or "no epoch finished"

    @property
    def _span(self) -> str:
        return f"{self.batches.start:,} to {self.batches.stop - 1:,}"


def follow(path: Sequence[Commit], faults: Faults, tell: Tell) -> list[Turn]:
    """The loaders' turns along a run's commits."""
    turns: list[list[tuple[Commit, Span]]] = []
    expected = 0 if path and path[0].parent is None else None
    for commit in path:
        for span in commit.spans:
            first = span.batches.start
            if expected is not None and first > expected:
                faults.add(f"{commit} begins with batch {first:,}: batches {expected:,} to {first - 1:,} are missing")
            elif expected is not None and first < expected:
                again = min(expected, span.batches.stop) - 1
                faults.add(f"{commit} begins with batch {first:,}: batches {first:,} to {again:,} were used before")
            expected = span.batches.stop
            if turns and turns[-1][0][1].data == span.data:
                turns[-1].append((commit, span))
            else:
                turns.append([(commit, span)])
    return [_judge(turn, faults, tell) for turn in turns]


def _judge(turn: Sequence[tuple[Commit, Span]], faults: Faults, tell: Tell) -> Turn:
    data = turn[0][1].data
    first = min(span.batches.start for _, span in turn)
    batches = range(first, max(span.batches.stop for _, span in turn))
    kind = data.get("kind")
    if kind != "indexed":
        _check_batches(turn, faults)
        return Turn("stream" if kind == "stream" else "foreign", batches)
    if (problem := _problem(data)) is not None:
        faults.add(f"{turn[0][0]}: {problem}")
        return Turn("indexed", batches)
    cut = Cut(data["length"], data["global_batch"], 1, data["tail"])
    for commit, span in turn:
        _check_records(commit, "consumed", span.consumed, _consumed(cut, span.batches), faults)
        _check_records(commit, "dropped", span.dropped, _dropped(cut, span.batches), faults)
    return _Epochs(cut, batches, data, faults, tell).judge([span for _, span in turn])


def _problem(data: Mapping[str, Any]) -> str | None:
    """What makes it impossible to say which samples the data's positions are."""
    length, batch = data.get("length"), data.get("global_batch")
    if type(length) is not int or not 1 <= length <= _MAX_LENGTH:
        return f"its data set is said to have {shown(length)} samples: expected 1 to {_MAX_LENGTH:,}"
    if type(batch) is not int or not 1 <= batch <= _MAX_LENGTH:
        return f"its global batch is said to be {shown(batch)}: expected 1 to {_MAX_LENGTH:,}"
    if data.get("tail") not in get_args(Tail):
        return f"its tail is said to be {shown(data.get('tail'))}: expected {', '.join(get_args(Tail))}"
    if data["tail"] == "drop" and batch > length:
        return f"its global batch of {batch:,} is more than the data set's {length:,} samples"
    if type(data.get("seed")) is not int or type(data.get("shuffle")) is not bool:
        return "its data has no seed, or does not say whether it is shuffled"
    if data.get("order_version") != ORDER_VERSION:
        return f"its order is of version {shown(data.get('order_version'))}: this lockstep knows {ORDER_VERSION}"
    return None


def _consumed(cut: Cut, batches: range) -> Iterator[Stretch]:
    """What these batches consume, as a ledger lists it."""
    number = batches.start
    while number < batches.stop:
        epoch, first = divmod(number, len(cut))
        stop = min(first + batches.stop - number, len(cut))
        yield Stretch(epoch, cut.positions(first).start, cut.positions(stop - 1).stop)
        number += stop - first


def _dropped(cut: Cut, batches: range) -> Iterator[Stretch]:
    left = cut.dropped()
    if left:
        for epoch in range(batches.start // len(cut), batches.stop // len(cut)):
            yield Stretch(epoch, left.start, left.stop)


def _check_records(
    commit: Commit, name: str, listed: Sequence[Stretch], due: Iterator[Stretch], faults: Faults
) -> None:
    """Only as far as the first that differs: what is due may be endless, if the batches' numbers are made up."""
    for found, expected in zip_longest(listed, due):
        if found != expected:
            told = "nothing more" if found is None else f"positions {found}"
            wanted = "nothing more" if expected is None else f"positions {expected}"
            faults.add(f"{commit} lists {told} as {name}, where its batches have {wanted}")
            return


def _check_batches(turn: Sequence[tuple[Commit, Span]], faults: Faults) -> None:
    """Of a loader without positions: do the stretches name the span's batches, each once, and epochs in turn?"""
    epoch: int | None = None
    for commit, span in turn:
        number = span.batches.start
        for stretch in span.consumed:
            follows = epoch is None or epoch <= stretch.epoch <= epoch + 1
            if stretch.start != number or not follows:
                faults.add(f"{commit} lists batches {stretch} where batch {number:,} is due")
                break
            number, epoch = stretch.stop, stretch.epoch
        else:
            if number != span.batches.stop:
                faults.add(f"{commit} lists its batches up to {number:,} instead of {span.batches.stop:,}")


class _Epochs:
    """The epochs that a turn's batches reach."""

    def __init__(self, cut: Cut, batches: range, data: Mapping[str, Any], faults: Faults, tell: Tell) -> None:
        self._cut = cut
        self._batches = batches
        self._data = data
        self._faults = faults
        self._tell = tell

    def judge(self, spans: Sequence[Span]) -> Turn:
        covered: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for span in spans:
            for epoch, start, stop in (*span.consumed, *span.dropped):
                covered[epoch].append((start, stop))
        reached = range(self._batches.start // len(self._cut), (self._batches.stop - 1) // len(self._cut) + 1)
        absent = list(islice((epoch for epoch in reached if epoch not in covered), _MOST_NAMED))
        num_finished, partial = 0, []
        for epoch in sorted([*covered, *absent]):
            if epoch not in reached:
                self._faults.add(f"epoch {epoch + 1:,}: samples were used, and no batch reaches it")
                continue
            due = self._due(epoch)
            is_right = self._is_covered(epoch, due, sorted(covered.get(epoch, [])))
            if len(due) == self._cut.length:
                num_finished += is_right
            elif is_right:
                partial.append(Partial(epoch, due.start, due.stop))
        if num_more := len(reached) - sum(epoch in reached for epoch in [*covered, *absent]):
            self._faults.add(f"{_count(num_more, 'more epoch')}: no sample was used")
        dropped = len(self._cut.dropped())
        return Turn("indexed", self._batches, self._cut.length, dropped, num_finished, tuple(partial))

    def _due(self, epoch: int) -> range:
        """The positions of an epoch that the turn's batches stand for; at its end also those that are dropped."""
        first, last = (number - epoch * len(self._cut) for number in (self._batches.start, self._batches.stop))
        start = max(first, 0) * self._cut.global_batch
        return range(start, self._cut.length if last >= len(self._cut) else last * self._cut.global_batch)

    def _is_covered(self, epoch: int, due: range, stretches: Sequence[tuple[int, int]]) -> bool:
        missing, repeated, stray = _compare(due, stretches)
        order = Order(self._cut.length, self._data["seed"], epoch, self._data["shuffle"])
        for ranges, what in ((missing, "never used or dropped"), (repeated, "used or dropped more than once")):
            if ranges:
                samples = ", ".join(str(order[position]) for position in _first_of(ranges))
                num = sum(map(len, ranges))
                self._faults.add(f"epoch {epoch + 1:,}: {_count(num, 'sample')} {what}: {_listed(samples, num)}")
        if stray:
            places = ", ".join(f"{part.start:,} to {part.stop - 1:,}" for part in stray[:_MOST_NAMED])
            self._faults.add(f"epoch {epoch + 1:,}: positions were used that no batch has come to: {places}")
        if missing or repeated or stray:
            return False
        return self._is_one_to_one(epoch, order, due)

    def _is_one_to_one(self, epoch: int, order: Order, due: range) -> bool:
        """Do so many positions lead to as many samples?"""
        bitmap = np.zeros(-(-self._cut.length // 8), dtype=np.uint8)
        for start in range(due.start, due.stop, _CHUNK):
            self._tell(f"epoch {epoch + 1:,}: position {start:,} of {due.stop:,}")
            samples = order.indices(start, min(start + _CHUNK, due.stop))
            np.bitwise_or.at(bitmap, samples >> 3, np.left_shift(1, samples & 7).astype(np.uint8))
        num_seen = sum(int(np.unpackbits(piece).sum()) for piece in _pieces(bitmap))
        if num_seen != len(due):
            self._faults.add(f"epoch {epoch + 1:,}: {len(due):,} positions of its order are only {num_seen:,} samples")
        return num_seen == len(due)


class _Comparison(NamedTuple):
    missing: list[range]
    repeated: list[range]
    stray: list[range]


def _compare(due: range, stretches: Sequence[tuple[int, int]]) -> _Comparison:
    """Positions that are due with those that came, which are sorted by their start."""
    found = _Comparison([], [], [])
    reach = repeated_to = due.start  # everything due before it is accounted for; and was said to be repeated
    for start, stop in stretches:
        for outside in (range(start, min(stop, due.start)), range(max(start, due.stop), stop)):
            if outside:
                found.stray.append(outside)
        start, stop = max(start, due.start), min(stop, due.stop)
        if start >= stop:
            continue
        if start > reach:
            found.missing.append(range(reach, start))
        if again := range(max(start, repeated_to), min(stop, reach)):
            found.repeated.append(again)
            repeated_to = again.stop
        reach = max(reach, stop)
    if reach < due.stop:
        found.missing.append(range(reach, due.stop))
    return found


def _first_of(ranges: Sequence[range]) -> list[int]:
    return list(islice((position for part in ranges for position in part), _MOST_NAMED))


def _listed(samples: str, num: int) -> str:
    return f"{samples} and {num - _MOST_NAMED:,} more" if num > _MOST_NAMED else samples


def _pieces(bitmap: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    for start in range(0, len(bitmap), _CHUNK):
        yield bitmap[start : start + _CHUNK]


def _count(num: int, noun: str) -> str:
    return f"{num:,} {noun}" if num == 1 else f"{num:,} {noun}s"
