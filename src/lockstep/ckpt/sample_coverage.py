"""Check that every sample was used once, from the positions listed by the commits in the ledger.

A run uses one loader after another. In each epoch of a loader, every position that its batches reach must be consumed
or dropped once, in the order of the batches; and the epoch's order must map these positions to different samples.
Positions are compared as ranges and samples are marked in a bitmap, so memory stays small whatever a ledger says.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from lockstep.checkpoint.ledger import Commit, Faults, PositionRange, Span, printable_value
from lockstep.config.plurals import count_noun
from lockstep.data.lanes import Batching, Tail
from lockstep.data.sample_order import ORDER_VERSION, SampleOrder

_MAX_LENGTH = 2**31
_CHUNK = 2**16  # positions at once
_MAX_LISTED = 10

ShowProgress = Callable[[str], None]


class PartialEpoch(NamedTuple):
    """An epoch that a loader used only partly: it is not over, or another loader was used before or after."""

    epoch: int
    start: int  # position
    stop: int


class LoaderCoverage(NamedTuple):
    """The consecutive batches of one loader, and the audit's result for them."""

    kind: str
    batches: range
    num_samples: int = 0  # in the data set, if they are numbered
    num_dropped: int = 0  # in each epoch
    num_finished: int = 0  # epochs in which every sample was used once or dropped
    partial: tuple[PartialEpoch, ...] = ()

    def __str__(self) -> str:
        if self.kind == "stream":
            return f"batches {self._span} of a stream, each once: its samples have no numbers to compare"
        if self.kind != "indexed":
            return f"batches {self._span} of a loader that does not record its samples: nothing can be proven"
        words = []
        if self.num_finished:
            dropped = f" or dropped ({self.num_dropped:,} per epoch)" if self.num_dropped else ""
            epochs = count_noun(self.num_finished, "finished epoch")
            words.append(f"{epochs}: each of {self.num_samples:,} samples exactly once{dropped}")
        for epoch, start, stop in self.partial:
            percent = 100 * (stop - start) // self.num_samples
            part = f"{percent}%" if percent else "less than 1%"
            words.append(f"{part} of epoch {epoch + 1:,}" + (f", from position {start:,} on" if start else ""))
        return "; ".join(words) or "no epoch finished"

    @property
    def _span(self) -> str:
        return f"{self.batches.start:,} to {self.batches.stop - 1:,}"


class _Use(NamedTuple):
    """One commit's use of a loader."""

    commit: Commit
    span: Span


def loader_coverage(path: Sequence[Commit], faults: Faults, show_progress: ShowProgress) -> list[LoaderCoverage]:
    """Check what the commits of a run consumed, one loader after another.

    Args:
        path: the run's commits, from the first to the newest.
        faults: the list to which faults are added.
        show_progress: called with a line of text now and then.
    """
    loaders: list[list[_Use]] = []
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
            if loaders and loaders[-1][0].span.data == span.data:
                loaders[-1].append(_Use(commit, span))
            else:
                loaders.append([_Use(commit, span)])
    return [_check_loader(uses, faults, show_progress) for uses in loaders]


def _check_loader(uses: Sequence[_Use], faults: Faults, show_progress: ShowProgress) -> LoaderCoverage:
    data = uses[0].span.data
    first = min(span.batches.start for _, span in uses)
    batches = range(first, max(span.batches.stop for _, span in uses))
    kind = data.get("kind")
    if kind != "indexed":
        _check_batches(uses, faults)
        return LoaderCoverage("stream" if kind == "stream" else "foreign", batches)
    if (problem := _data_problem(data)) is not None:
        faults.add(f"{uses[0].commit}: {problem}")
        return LoaderCoverage("indexed", batches)
    batching = Batching(data["length"], data["global_batch"], 1, data["tail"])
    for commit, span in uses:
        _check_records(commit, "consumed", span.consumed, _expected_consumed(batching, span.batches), faults)
        _check_records(commit, "dropped", span.dropped, _expected_dropped(batching, span.batches), faults)
    return _Epochs(batching, batches, data, faults, show_progress).check([span for _, span in uses])


def _data_problem(data: Mapping[str, Any]) -> str | None:
    """Return why the samples at the data's positions cannot be computed, or None if they can."""
    length, batch = data.get("length"), data.get("global_batch")
    if type(length) is not int or not 1 <= length <= _MAX_LENGTH:
        return f"its data set has {printable_value(length)} samples: expected 1 to {_MAX_LENGTH:,}"
    if type(batch) is not int or not 1 <= batch <= _MAX_LENGTH:
        return f"its global batch is {printable_value(batch)}: expected 1 to {_MAX_LENGTH:,}"
    if data.get("tail") not in get_args(Tail):
        return f"its tail is {printable_value(data.get('tail'))}: expected {', '.join(get_args(Tail))}"
    if data["tail"] == "drop" and batch > length:
        return f"its global batch of {batch:,} is more than the data set's {length:,} samples"
    if type(data.get("seed")) is not int or type(data.get("shuffle")) is not bool:
        return "its data has no seed, or does not record whether it is shuffled"
    if data.get("order_version") != ORDER_VERSION:
        version = printable_value(data.get("order_version"))
        return f"its sample order has version {version}: this lockstep knows {ORDER_VERSION}"
    return None


def _expected_consumed(batching: Batching, batches: range) -> Iterator[PositionRange]:
    """Yield what these batches consume, as a ledger lists it."""
    number = batches.start
    while number < batches.stop:
        epoch, first = divmod(number, len(batching))
        stop = min(first + batches.stop - number, len(batching))
        yield PositionRange(epoch, batching.positions(first).start, batching.positions(stop - 1).stop)
        number += stop - first


def _expected_dropped(batching: Batching, batches: range) -> Iterator[PositionRange]:
    """Yield what is dropped at the end of the epochs that these batches finish, as a ledger lists it."""
    left = batching.dropped()
    if left:
        for epoch in range(batches.start // len(batching), batches.stop // len(batching)):
            yield PositionRange(epoch, left.start, left.stop)


def _check_records(
    commit: Commit, name: str, listed: Sequence[PositionRange], expected: Iterator[PositionRange], faults: Faults
) -> None:
    """Compare up to the first difference: with forged batch numbers, the expected ranges may be endless."""
    for found, wanted in zip_longest(listed, expected):
        if found != wanted:
            found_text = "nothing more" if found is None else f"positions {found}"
            wanted_text = "nothing more" if wanted is None else f"positions {wanted}"
            faults.add(f"{commit} lists {found_text} as {name}, where its batches have {wanted_text}")
            return


def _check_batches(uses: Sequence[_Use], faults: Faults) -> None:
    """For a loader without positions: check that each batch is listed once, and that epochs follow each other."""
    epoch: int | None = None
    for commit, span in uses:
        number = span.batches.start
        for listed in span.consumed:
            follows = epoch is None or epoch <= listed.epoch <= epoch + 1
            if listed.start != number or not follows:
                faults.add(f"{commit} lists batches {listed} where batch {number:,} is expected")
                break
            number, epoch = listed.stop, listed.epoch
        else:
            if number != span.batches.stop:
                faults.add(f"{commit} lists its batches up to {number:,} instead of {span.batches.stop:,}")


class _Epochs:
    """Checks the epochs that a loader's batches reach."""

    def __init__(
        self, batching: Batching, batches: range, data: Mapping[str, Any], faults: Faults, show_progress: ShowProgress
    ) -> None:
        self._batching = batching
        self._batches = batches
        self._data = data
        self._faults = faults
        self._show_progress = show_progress

    def check(self, spans: Sequence[Span]) -> LoaderCoverage:
        """Check that the spans cover each epoch as the batches say."""
        covered: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for span in spans:
            for epoch, start, stop in (*span.consumed, *span.dropped):
                covered[epoch].append((start, stop))
        reached = range(self._batches.start // len(self._batching), (self._batches.stop - 1) // len(self._batching) + 1)
        absent = list(islice((epoch for epoch in reached if epoch not in covered), _MAX_LISTED))
        num_finished, partial = 0, []
        for epoch in sorted([*covered, *absent]):
            if epoch not in reached:
                self._faults.add(f"epoch {epoch + 1:,}: samples were used, but no batch reaches it")
                continue
            expected = self._expected(epoch)
            is_covered = self._is_covered(epoch, expected, sorted(covered.get(epoch, [])))
            if len(expected) == self._batching.length:
                num_finished += is_covered
            elif is_covered:
                partial.append(PartialEpoch(epoch, expected.start, expected.stop))
        if num_more := len(reached) - sum(epoch in reached for epoch in [*covered, *absent]):
            self._faults.add(f"{count_noun(num_more, 'more epoch')}: no sample was used")
        dropped = len(self._batching.dropped())
        return LoaderCoverage("indexed", self._batches, self._batching.length, dropped, num_finished, tuple(partial))

    def _expected(self, epoch: int) -> range:
        """Return the positions of an epoch that the batches use, with those dropped at its end."""
        first, last = (number - epoch * len(self._batching) for number in (self._batches.start, self._batches.stop))
        start = max(first, 0) * self._batching.global_batch
        return range(
            start, self._batching.length if last >= len(self._batching) else last * self._batching.global_batch
        )

    def _is_covered(self, epoch: int, expected: range, found: Sequence[tuple[int, int]]) -> bool:
        missing, repeated, unexpected = _compare(expected, found)
        order = SampleOrder(self._batching.length, self._data["seed"], epoch, self._data["shuffle"])
        for ranges, what in ((missing, "never used or dropped"), (repeated, "used or dropped more than once")):
            if ranges:
                samples = ", ".join(str(order[position]) for position in _first_of(ranges))
                num = sum(map(len, ranges))
                self._faults.add(f"epoch {epoch + 1:,}: {count_noun(num, 'sample')} {what}: {_listed(samples, num)}")
        if unexpected:
            places = ", ".join(f"{part.start:,} to {part.stop - 1:,}" for part in unexpected[:_MAX_LISTED])
            self._faults.add(f"epoch {epoch + 1:,}: positions were used that no batch reaches: {places}")
        if missing or repeated or unexpected:
            return False
        return self._is_one_to_one(epoch, order, expected)

    def _is_one_to_one(self, epoch: int, order: SampleOrder, positions: range) -> bool:
        """Does the epoch's order map these positions to different samples?"""
        bitmap = np.zeros(-(-self._batching.length // 8), dtype=np.uint8)
        for start in range(positions.start, positions.stop, _CHUNK):
            self._show_progress(f"epoch {epoch + 1:,}: position {start:,} of {positions.stop:,}")
            samples = order.indices(start, min(start + _CHUNK, positions.stop))
            np.bitwise_or.at(bitmap, samples >> 3, np.left_shift(1, samples & 7).astype(np.uint8))
        num_seen = sum(int(np.unpackbits(chunk).sum()) for chunk in _chunks(bitmap))
        if num_seen != len(positions):
            self._faults.add(
                f"epoch {epoch + 1:,}: {len(positions):,} positions of its order are only {num_seen:,} samples"
            )
        return num_seen == len(positions)


class _Comparison(NamedTuple):
    """How the positions that were used differ from the expected ones."""

    missing: list[range]
    repeated: list[range]
    unexpected: list[range]


def _compare(expected: range, found: Sequence[tuple[int, int]]) -> _Comparison:
    """Compare the expected positions with the ranges that were used, which are sorted by their start."""
    result = _Comparison([], [], [])
    covered_to = repeated_to = expected.start  # expected positions before these are covered; reported as repeated
    for start, stop in found:
        for outside in (range(start, min(stop, expected.start)), range(max(start, expected.stop), stop)):
            if outside:
                result.unexpected.append(outside)
        start, stop = max(start, expected.start), min(stop, expected.stop)
        if start >= stop:
            continue
        if start > covered_to:
            result.missing.append(range(covered_to, start))
        if again := range(max(start, repeated_to), min(stop, covered_to)):
            result.repeated.append(again)
            repeated_to = again.stop
        covered_to = max(covered_to, stop)
    if covered_to < expected.stop:
        result.missing.append(range(covered_to, expected.stop))
    return result


def _first_of(ranges: Sequence[range]) -> list[int]:
    return list(islice((position for part in ranges for position in part), _MAX_LISTED))


def _listed(samples: str, num: int) -> str:
    return f"{samples} and {num - _MAX_LISTED:,} more" if num > _MAX_LISTED else samples


def _chunks(bitmap: npt.NDArray[np.uint8]) -> Iterator[npt.NDArray[np.uint8]]:
    for start in range(0, len(bitmap), _CHUNK):
        yield bitmap[start : start + _CHUNK]
