"""What is recorded of the rows of a batch."""

import torch

from lockstep.supervision.batch_rows import record_rows


def test_a_row_is_the_same_whatever_it_is_padded_with() -> None:
    row = torch.tensor([5, 3, 3, 2])
    for value in (0, 1, 50256):
        (padded,) = record_rows(torch.cat([row, torch.full((3,), value)])[None])
        (left,) = record_rows(torch.cat([torch.full((3,), value), row])[None])
        (alone,) = record_rows(row[None])
        assert padded.without_tail == alone.digest == left.without_head
        assert padded.tail == left.head == record_rows(torch.tensor([value]))[0].digest
        assert len({padded.digest, alone.digest, left.digest}) == 3


def test_rows_of_vectors_are_padded_with_vectors() -> None:
    row = torch.randn(4, 3)
    (padded,) = record_rows(torch.cat([row, torch.zeros(2, 3)])[None])
    assert padded.without_tail == record_rows(row[None])[0].digest


def test_rows_without_elements_and_numbers() -> None:
    assert len({row.digest for row in record_rows(torch.tensor([1.0, 2.0, 2.0]))}) == 2
    assert len({row.digest for row in record_rows(torch.zeros(2, 0))}) == 1
    (nan,) = record_rows(torch.tensor([[1.0, float("nan")]]))
    assert nan.without_tail == record_rows(torch.tensor([[1.0]]))[0].digest


def test_a_rounded_row_is_close_and_another_is_not() -> None:
    row = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    (first,), (rounded,), (turned,) = (record_rows(each) for each in (row, row * (1 + 1e-7), row.flip(1)))
    assert first.digest != rounded.digest
    assert abs(first.projection - rounded.projection) < 1e-5 * first.norm
    assert abs(first.projection - turned.projection) > 1e-3 * first.norm
