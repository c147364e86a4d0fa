"""Accumulators: the same bits however chunks are split over ranks, in bounded memory."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.errors import UserError
from lockstep.metrics.accumulators import (
    Accumulator,
    GroupedAccumulator,
    MergedAccumulator,
    PieceAccumulator,
    RowAccumulator,
    pack,
    unpack,
)


def collected(make: type[Any], values: dict[int, Any], edges: list[int]) -> Any:
    """Return the merged value if ranks have the chunks between these edges; the first rank with any chunk merges it."""
    accumulators: list[Accumulator] = []
    for start, stop in zip([0, *edges], [*edges, max(values) + 1], strict=True):
        mine = {chunk: value for chunk, value in values.items() if start <= chunk < stop}
        if mine:
            accumulators.append(make())
            for chunk, value in mine.items():
                accumulators[-1].add(chunk, value)
    return accumulators[0].merged([accumulator.packet() for accumulator in accumulators])


WILD = st.floats(-1e30, 1e30)


@given(st.dictionaries(st.integers(0, 40), st.lists(WILD, min_size=2, max_size=2), min_size=1), st.data())
def test_any_split_gives_the_same_bits(values: dict[int, list[float]], data: st.DataObject) -> None:
    """Also with missing chunks: a metrics function need not return every metric for every batch."""
    edges = sorted(data.draw(st.lists(st.integers(0, max(values) + 1), max_size=4)))
    tensors = {chunk: torch.tensor(values[chunk], dtype=torch.float64) for chunk in sorted(values)}
    for make in (RowAccumulator, MergedAccumulator):
        alone, split = collected(make, tensors, []), collected(make, tensors, edges)
        assert alone.tolist() == split.tolist()
    alone, split = (collected(PieceAccumulator, {c: [t] for c, t in tensors.items()}, each) for each in ([], edges))
    assert [[t.tolist() for t in pieces] for pieces in alone] == [[t.tolist() for t in pieces] for pieces in split]
    assert [pieces[0].tolist() for pieces in alone] == [tensor.tolist() for tensor in tensors.values()]


def test_few_partial_sums_are_held() -> None:
    accumulator = MergedAccumulator()
    for chunk in range(500, 1500):
        accumulator.add(chunk, torch.ones(3, dtype=torch.int32))
    packet = accumulator.packet()
    assert len(packet["nodes"]) <= 2 * math.log2(1000)
    assert accumulator.merged([packet]).tolist() == [1000] * 3


def test_sums_are_computed_in_fp64_and_rounded_once() -> None:
    values = {chunk: torch.tensor(value) for chunk, value in enumerate([2.0**24, 1.0, 1.0, 1.0])}
    total: Tensor = collected(MergedAccumulator, values, [2])
    assert (total.dtype, total.item()) == (
        torch.float32,
        2.0**24 + 4,
    )  # 3 more, rounded to even; in fp32: none more


def test_the_order_is_that_of_the_chunks() -> None:
    rows, pieces = RowAccumulator(), PieceAccumulator()
    for chunk in (7, 2, 5):
        rows.add(chunk, torch.tensor([chunk]))
        pieces.add(chunk, torch.full((chunk,), chunk))
    assert rows.merged([rows.packet()]).tolist() == [[2], [5], [7]]
    assert [[len(piece) for piece in chunk] for chunk in pieces.merged([pieces.packet()])] == [[2], [5], [7]]


def test_rows_must_have_the_same_shape() -> None:
    rows = RowAccumulator()
    rows.add(0, torch.zeros(2))
    with pytest.raises(UserError, match=r"numbers of shape \(2,\), another of shape \(3,\)"):
        rows.add(1, torch.zeros(3))


def test_values_go_to_the_accumulator_of_their_name() -> None:
    together = GroupedAccumulator({"sum": MergedAccumulator(), "pieces": PieceAccumulator()})
    for chunk in range(2):
        together.add(chunk, {"sum": torch.tensor(chunk + 1), "pieces": [torch.zeros(chunk)]})
    merged = together.merged([together.packet()])
    assert merged["sum"].item() == 3
    assert [len(piece) for (piece,) in merged["pieces"]] == [0, 1]


def test_packed_tensors_come_back_unchanged() -> None:
    tensors = [
        torch.rand(2, 3),
        torch.arange(4),
        torch.rand(()),
        torch.tensor([True]),
        torch.rand(0, 5),
        torch.arange(2),
    ]
    packed = pack(tensors)
    assert len(packed["flat"]) == 3  # one per dtype
    for tensor, back in zip(tensors, unpack(packed), strict=True):
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(back, tensor)
