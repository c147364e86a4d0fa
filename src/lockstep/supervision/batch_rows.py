"""The rows of a batch as `lockstep verify` records them: recognizable on other ranks, padded otherwise, or rounded."""

import hashlib
from typing import Any, NamedTuple

_DIGEST_DIGITS = 16


class RecordedRow(NamedTuple):
    """What is recorded of a row of a batch.

    What a script pads with is not known, so a row is also recorded without the equal elements at its end, and without
    those at its beginning: whichever they are, the same row has the same digest once they are off.
    """

    digest: str
    tail: str = ""  # the digest of its last element; "" if the row is a single number
    without_tail: str = ""  # the digest of the row without its last elements that are equal
    head: str = ""
    without_head: str = ""
    projection: float = 0.0  # of a row of floating-point numbers onto a fixed direction: nearly equal for a rounded row
    norm: float = 0.0


def record_rows(batch: Any) -> list[RecordedRow]:
    """Record each row of a tensor of at least one dimension."""
    batch = batch.detach().cpu()
    measured = [(0.0, 0.0)] * len(batch)
    if batch.is_floating_point() and batch.numel():
        measured = _measure(batch.reshape(len(batch), -1))
    return [_record(row, *each) for row, each in zip(batch, measured, strict=True)]


def digest_tensor(tensor: Any) -> str:
    """Return a digest of a CPU tensor: its type, shape and values."""
    import torch

    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\x00".encode())
    if tensor.numel():
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:_DIGEST_DIGITS]


def _record(row: Any, projection: float, norm: float) -> RecordedRow:
    digest = digest_tensor(row)
    if row.ndim == 0 or len(row) == 0:
        return RecordedRow(digest, projection=projection, norm=norm)
    return RecordedRow(
        digest,
        digest_tensor(row[-1]),
        digest_tensor(row[: len(row) - _num_equal(row, from_end=True)]),
        digest_tensor(row[0]),
        digest_tensor(row[_num_equal(row, from_end=False) :]),
        projection,
        norm,
    )


def _num_equal(row: Any, *, from_end: bool) -> int:
    """Count the elements at the end, or at the beginning, that are equal to the last, or first, one."""
    is_equal = (row == row[-1 if from_end else 0]).reshape(len(row), -1).all(dim=1)
    is_equal[-1 if from_end else 0] = True  # NaN is not equal to itself
    return int((is_equal.flip(0) if from_end else is_equal).long().cumprod(0).sum())


def _measure(rows: Any) -> list[tuple[float, float]]:
    import torch

    values = torch.nan_to_num(rows.double())
    direction = torch.cos(torch.arange(values.shape[1], dtype=torch.float64) * 1.7)
    return list(zip((values @ direction).tolist(), values.norm(dim=1).tolist(), strict=True))
