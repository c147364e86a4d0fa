"""Judge the updates of two jobs: do they differ by rounding alone, or where does something else begin?

Rounding is judged by size: the norm of a tensor's difference, relative to the tensor. The largest element would not do:
one activation that rounding moves across the kink of a ReLU changes some elements of the gradient by a lot. A tensor
that is small next to the whole gradient, or to the largest gradient so far, counts as larger, for it may be zero but
for rounding.

Weights are not compared so: an optimizer such as Adam makes a full step of a gradient that is rounding alone. What
counts is how far weights have moved, in the elements in which both jobs had the same gradient in every update so far.

Training amplifies rounding. When that has gone so far that gradients differ by more, without ever having jumped, values
tell nothing any more, and only rows, learning rates, ranks and the number of updates are compared.
"""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lockstep.events.step_trace import TraceDifference, read_trace
from lockstep.supervision.step_recorder import BUFFERS, GRADIENT, RATES, ROWS, START, WEIGHTS
from lockstep.verify.recorded_updates import UPDATE_PHASES, RecordedUpdates
from lockstep.verify.row_matching import are_alike
from lockstep.verify.value_comparison import UpdateValues, alignment_of, distance_of, norm_of, relative_distance
from lockstep.verify.verify_verdict import END_OF_RUN

if TYPE_CHECKING:
    from lockstep.verify.value_comparison import Array, Pair

# Upper bounds of rounding: where something else would explain more; in fp32 at first; when training has amplified it;
# and in bf16, fp16 or TF32.
ROUNDING = 1e-4
FLOAT32_ROUNDING, AMPLIFIED_ROUNDING, LOW_PRECISION_ROUNDING = 2e-3, 2e-2, 1e-1
# A tensor counts as at least this large, relative to all tensors: the gradient of a bias that has no effect, such as
# that of attention's keys, is zero but for rounding. Measured: 1e-9 in fp32, 2e-5 in bf16.
_SMALLEST_TENSOR = 1e-3
_JUMP = 10.0  # training amplifies rounding from one update to the next by less
_SAME_ELEMENT = 1e-2  # relative difference of an element of the gradient
_SAME_MOVE = 5e-2  # relative difference of how far the weights have moved
_OTHER_MOVE = 4.0  # times what a tensor may differ by: too much even if all tensors together agree
# A weight moves in steps of its resolution.
_FLOAT32_RESOLUTION, _LOW_RESOLUTION = 1e-6, 1e-2

_NONE = "none"  # the digest of a gradient that there is not


class Judgement(NamedTuple):
    """What the differences between two jobs come to."""

    mistake: TraceDifference | None  # the first difference that is more than rounding
    amplified_at: int | None = None  # the update from which on rounding hides what there is
    compares_rows: bool = True  # not if the first dimension of the models' inputs is not that of the samples


def judge_updates(one: RecordedUpdates, many: RecordedUpdates, *, is_complete: bool) -> Judgement:
    """Find the first difference that is more than rounding, between the jobs or between the ranks of the second.

    Args:
        one: the updates of one process.
        many: the updates of several.
        is_complete: neither has failed, so they should have made the same number of updates.
    """
    judge = _Judge(one, many)
    ranks = None if many.disagreement is None else many.disagreement.at
    for step in range(1, min(one.num_updates, many.num_updates) + 1):
        found = judge.first_of_update(step)
        if ranks is not None and ranks.step == step and (found is None or _place(ranks) < _place(found)):
            return Judgement(ranks)
        if found is not None:
            return Judgement(found)
    counts = {one.num_updates, *many.updates_by_rank}
    if is_complete and len(counts) > 1:
        by_rank = sorted(set(many.updates_by_rank))
        what = f"{one.num_updates} steps and {' or '.join(str(count) for count in by_rank)}"
        return Judgement(TraceDifference(min(counts), END_OF_RUN, what, 1), judge.amplified_at)
    return Judgement(None, judge.amplified_at, judge.compares_rows)


def _place(difference: TraceDifference) -> int:
    return UPDATE_PHASES.index(difference.phase)


class _Judge:
    """Compares one update after another, in order."""

    def __init__(self, one: RecordedUpdates, many: RecordedUpdates) -> None:
        self.amplified_at: int | None = None
        self.compares_rows = True
        self._one, self._many = one, many
        self._traces = read_trace(one.trace), read_trace(many.trace)
        self._last_weights: dict[str, Pair] = {}
        self._has_same_gradient: dict[str, Array] = {}  # for each weight, in all updates so far
        self._largest_gradient = 0.0  # the norm of all tensors
        self._gaps: dict[str, float] = {}  # for each gradient, the largest so far
        self._rounding = LOW_PRECISION_ROUNDING if many.has_low_precision else AMPLIFIED_ROUNDING

    def first_of_update(self, step: int) -> TraceDifference | None:
        """Return the first difference of this update that is more than rounding."""
        values = UpdateValues(self._one.rank_0.values(step), self._many.rank_0.values(step))
        judges = {
            START: self._changed_before,
            ROWS: self._other_rows,
            GRADIENT: self._other_gradients,
            RATES: self._other_rates,
            WEIGHTS: self._moved_otherwise,
            BUFFERS: self._other_buffers,
        }
        for phase in UPDATE_PHASES:
            own, theirs = (trace[step].get(phase, {}) for trace in self._traces)
            names = [name for name in dict.fromkeys([*own, *theirs]) if own.get(name) != theirs.get(name)]
            found = judges[phase](step, names, values) if names else []
            if found:
                beyond = [name for name in names if name in found]
                return TraceDifference(step, phase, beyond[0], len(beyond))
            if phase == GRADIENT:
                self._note_gradients(values)
        self._last_weights |= values.pairs(WEIGHTS)
        return None

    def _changed_before(self, step: int, names: list[str], values: UpdateValues) -> list[str]:
        """Return the weights that something other than an optimizer has changed differently, or that began so."""
        if step == 1:  # a script may have changed the weights and back, which leaves rounding
            pairs = values.pairs(START)
            return [name for name in names if name not in pairs or _differs_by_more_than_resolution(pairs[name])]
        if self.amplified_at is not None:
            return []
        starts = dict(self._starts(values))
        moves = {name: (self._last_weights[name], starts[name]) for name in starts.keys() & self._last_weights.keys()}
        is_new = {name: pair for name, pair in starts.items() if name not in self._last_weights}
        return [*_above(ROUNDING, _gaps(is_new)), *self._different_moves(moves)]

    def _other_rows(self, step: int, names: list[str], values: UpdateValues) -> list[str]:
        if not self.compares_rows or are_alike(self._one.rows_of(step), self._many.rows_of(step)):
            return []
        if step == 1 and not self._many.is_work_repeated(self._one, step):
            # Other samples would give another gradient.
            gradients = values.pairs(GRADIENT).values()
            self.compares_rows = norm_of(gradients) == 0 or not relative_distance(gradients) <= ROUNDING
        return names if self.compares_rows else []

    def _other_gradients(self, step: int, names: list[str], values: UpdateValues) -> list[str]:
        own, theirs = (trace[step][GRADIENT] for trace in self._traces)
        missing = [name for name in names if (own.get(name, _NONE) == _NONE) != (theirs.get(name, _NONE) == _NONE)]
        if missing:
            return missing
        limit = self._rounding
        if step == 1 and self._many.layers:  # which explain more than rounding does
            limit = ROUNDING
        elif step == 1 and not self._many.has_low_precision:
            limit = FLOAT32_ROUNDING
        pairs = values.pairs(GRADIENT)
        self._largest_gradient = max(self._largest_gradient, norm_of(pairs.values()))
        gaps = _gaps(pairs, whole=self._largest_gradient)
        beyond = _above(limit, gaps)
        jumped = [name for name in beyond if not gaps[name] <= _JUMP * self._gaps.get(name, 0.0)]
        if step == 1 and not jumped and not self._many.has_low_precision and _are_scaled(pairs):
            jumped = names
        # Small gradients, near a minimum, consist of rounding.
        if (beyond and not jumped) or not relative_distance(pairs.values()) <= self._rounding:
            self.amplified_at = self.amplified_at or step
        self._gaps = {name: max(gap, self._gaps.get(name, 0.0)) for name, gap in gaps.items()}
        return jumped

    def _other_rates(self, step: int, names: list[str], values: UpdateValues) -> list[str]:  # noqa: ARG002
        own, theirs = (trace[step][RATES] for trace in self._traces)
        pairs = ((name, own.get(name), theirs.get(name)) for name in names)
        return [name for name, left, right in pairs if left is None or right is None or not _are_close(left, right)]

    def _moved_otherwise(self, step: int, names: list[str], values: UpdateValues) -> list[str]:  # noqa: ARG002
        if self.amplified_at is not None:
            return []
        before = self._last_weights | dict(self._starts(values))
        moves = {name: (before[name], pair) for name, pair in values.pairs(WEIGHTS).items() if name in before}
        return self._different_moves(moves)

    def _other_buffers(self, step: int, names: list[str], values: UpdateValues) -> list[str]:  # noqa: ARG002
        counts = [name for name, (left, _) in values.pairs(BUFFERS).items() if left.dtype.kind != "f"]
        numbers = {name: pair for name, pair in values.pairs(BUFFERS).items() if name not in counts}
        is_judged = self.amplified_at is None
        return [name for name in names if name in counts] or _above(self._rounding, _gaps(numbers) if is_judged else {})

    def _starts(self, values: UpdateValues) -> "Iterator[tuple[str, Pair]]":
        """Yield the weights before the update, of those that were changed since the last one in either job."""
        for name, (left, right) in values.either(START):
            last = self._last_weights.get(name)
            own, theirs = (last[0] if left is None and last else left), (last[1] if right is None and last else right)
            if own is not None and theirs is not None and own.shape == theirs.shape:
                yield name, (own, theirs)

    def _note_gradients(self, values: UpdateValues) -> None:
        import numpy as np

        for name, (left, right) in values.pairs(GRADIENT).items():
            with np.errstate(invalid="ignore"):  # infinity less infinity, which is not the same
                is_same = abs(left - right) <= _SAME_ELEMENT * np.maximum(abs(left), abs(right))
            known = self._has_same_gradient.get(name)
            self._has_same_gradient[name] = (
                is_same if known is None or known.shape != is_same.shape else known & is_same
            )

    def _different_moves(self, moves: "Mapping[str, tuple[Pair, Pair]]") -> list[str]:
        """Return the weights whose moves differ between the jobs by more than rounding, together or one by far."""
        import numpy as np

        squares = {}  # of the difference, and of what it may be
        for name, (before, after) in moves.items():
            values = np.stack([*before, *after]).astype("float64")
            is_compared = np.isfinite(values).all(axis=0)
            if (same := self._has_same_gradient.get(name)) is not None and same.shape == is_compared.shape:
                is_compared &= same
            own, theirs = (
                values[2, is_compared] - values[0, is_compared],
                values[3, is_compared] - values[1, is_compared],
            )
            allowed = _SAME_MOVE * max(np.linalg.norm(own), np.linalg.norm(theirs))
            allowed += _resolution(after) * np.linalg.norm(values[2, is_compared])
            squares[name] = float(np.sum((own - theirs) ** 2)), float(allowed**2)
        by_far = [name for name, (difference, allowed) in squares.items() if difference > _OTHER_MOVE**2 * allowed]
        if by_far and not self._many.has_low_precision:
            return by_far
        if sum(difference for difference, _ in squares.values()) <= sum(allowed for _, allowed in squares.values()):
            return []
        return [name for name, (difference, allowed) in squares.items() if difference > allowed]


def _gaps(pairs: "Mapping[str, Pair]", *, whole: float | None = None) -> dict[str, float]:
    """Return by how much each tensor differs, relative to its norm; `whole`: the norm of all of them."""
    smallest = _SMALLEST_TENSOR * (norm_of(pairs.values()) if whole is None else whole)
    return {name: distance_of(pair) / (max(norm_of([pair]), smallest) or 1.0) for name, pair in pairs.items()}


def _are_scaled(pairs: "Mapping[str, Pair]") -> bool:
    """Are the gradients of one job those of the other times a number, which rounding would not make of them?"""
    alignment = alignment_of(pairs.values())
    return alignment is not None and alignment.is_only_scaled


def _above(limit: float, gaps: Mapping[str, float]) -> list[str]:
    return [name for name, gap in gaps.items() if not gap <= limit]  # NaN is above any limit


def _are_close(one: str, other: str) -> bool:
    """Are these the same numbers but for rounding?"""
    left, right = ([float(number) for number in numbers.split()] for numbers in (one, other))
    return len(left) == len(right) and all(map(partial(math.isclose, rel_tol=ROUNDING), left, right))


def _differs_by_more_than_resolution(pair: "Pair") -> bool:
    return not distance_of(pair) <= _resolution(pair) * norm_of([pair])


def _resolution(values: "Pair") -> float:
    """Return the relative size of the smallest step of these values, which may be stored in low precision."""
    import numpy as np

    def is_low(value: "Array") -> bool:
        if value.dtype != np.float32:
            return False
        with np.errstate(over="ignore"):
            is_fp16 = (value.astype(np.float16) == value).all()
        return bool(is_fp16) or not (value.view(np.uint32) & 0xFFFF).any()

    return _LOW_RESOLUTION if all(map(is_low, values)) else _FLOAT32_RESOLUTION
