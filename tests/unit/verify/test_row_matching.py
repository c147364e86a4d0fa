"""When the rows of two jobs count as the same."""

import pytest
import torch

from lockstep.supervision.batch_rows import RecordedRow, record_rows
from lockstep.verify.row_matching import are_alike, differ_only_by_rounding, differ_only_in_padding

SENTENCES = [[7, 8, 9], [7], [4, 4], [7, 2, 2, 3, 1]]


def padded(*sentences: list[int], left: bool = False, value: int = 0) -> list[RecordedRow]:
    length = max(map(len, sentences))
    rows = [[value] * (length - len(words)) * left + words for words in sentences]
    return record_rows(torch.tensor([words + [value] * (length - len(words)) for words in rows]))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("value", [0, 4])
def test_rows_padded_to_another_length_are_alike(left: bool, value: int) -> None:
    one = padded(*SENTENCES, left=left, value=value)
    many = padded(*SENTENCES[::2], left=left, value=value) + padded(*SENTENCES[1::2], left=left, value=value)
    assert differ_only_in_padding(one, many)
    assert are_alike(one, many)
    other = padded(*SENTENCES[:3], [7, 2, 2, 3, 5], left=left, value=value)
    assert not are_alike(one, other)
    assert not are_alike(one, many[:-1])


def test_padding_that_few_rows_have_among_rows_with_other_ends() -> None:
    others = [[100 + number, 200 + number] for number in range(40)]
    one = padded(*SENTENCES, *others)
    many = padded(*SENTENCES[:2], *others[:20]) + padded(*SENTENCES[2:], *others[20:])
    assert are_alike(one, many)


def test_rows_that_another_model_has_computed_are_alike() -> None:
    values = torch.randn(32, 10, generator=torch.Generator().manual_seed(0))
    one, many = record_rows(values), record_rows(values.flip(0) * (1 + 1e-6))
    assert differ_only_by_rounding(one, many)
    assert not are_alike(one, record_rows(torch.randn(32, 10, generator=torch.Generator().manual_seed(1))))
    classes = torch.eye(10)
    assert not are_alike(record_rows(classes[[1, 2, 3]]), record_rows(classes[[1, 2, 4]])), "the same length and mean"


def test_no_rows() -> None:
    assert not are_alike([], record_rows(torch.ones(1, 2)))
