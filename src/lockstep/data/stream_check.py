"""Notice that the ranks read different rows from a stream that all of them should read alike.

A stream without `lane` is read whole by every rank, which keeps its own samples. If it also shards itself by rank, it
is sharded twice, and most samples are never trained on. So every batch's first row is compared over the ranks, as a
small number that travels with the batch's size.

[Note: rows by rank] Rows may also differ because the stream draws numbers from a generator that nobody seeds, which
does no harm where it is only noise, or because two machines round differently. So each rank reads a row that differs
once more, from the stream's beginning. If all ranks find their own row again, and ranks of one machine differ, then the
stream depends on the rank.
"""

import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.world.collectives import all_reduce, get_world_size
from lockstep.world.object_collectives import all_gather_object
from lockstep.world.world import World

logger = logging.getLogger("lockstep")

NO_ROW = 0  # the mark of a row that does not exist, because the stream has ended

_NUM_MARKS = (1 << 20) - 1  # so that the sum of squared marks over all ranks fits into 64 bits
_MAX_PIECES = 64  # of a row, to keep the mark cheap
_MAX_NUMBERS = 64  # of one tensor


def mark_of(row: Any) -> int:
    """Return a small number that equal rows have in common and different rows hardly ever."""
    crc = 0
    for piece in islice(_pieces(row), _MAX_PIECES):
        crc = zlib.crc32(piece.encode(errors="surrogatepass"), crc)
    return crc % _NUM_MARKS + 1


def _pieces(value: Any) -> Iterator[str]:
    """Yield texts that are equal in every process for equal rows; of objects of unknown types, only the type."""
    yield type(value).__name__
    if isinstance(value, Tensor | np.ndarray):
        yield str(tuple(value.shape))
        yield from map(repr, _some_numbers(value))
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        yield repr(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):  # its order may differ between processes
            yield repr(key) if isinstance(key, str | int) else ""
            yield from _pieces(value[key])
    elif isinstance(value, Sequence):
        yield str(len(value))
        for element in value:
            yield from _pieces(element)


def _some_numbers(values: Any) -> list[Any]:
    """Return numbers from all over a tensor or an array."""
    try:
        flat = values.reshape(-1)
        numbers: list[Any] = flat[:: max(1, len(flat) // _MAX_NUMBERS)][:_MAX_NUMBERS].tolist()
    except (RuntimeError, TypeError, NotImplementedError):  # sparse, nested, …
        return []
    return numbers


class RowOfRank(NamedTuple):
    """One row, as a rank has read it."""

    node: int
    mark: int
    is_repeatable: bool  # the rank reads the same row again


def sum_size_and_compare(size: int, mark: int, world: World) -> tuple[int, bool]:
    """Return the sum of all ranks' sizes, and whether all ranks have the same mark; the same on every rank."""
    if world.size == 1:
        return size, True
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    sums = all_reduce(torch.tensor([size, mark, mark * mark], device=device), "sum")
    total, marks, squares = sums.tolist()
    num_ranks = get_world_size()
    # With tensor parallelism the process group is larger than `world`: then several ranks have counted each sample.
    # Equal numbers are the only ones whose squares have the smallest sum possible.
    return total // max(num_ranks // world.size, 1), squares * num_ranks == marks * marks


def report_difference(name: str, epoch: int, row: int, mark: int, is_repeatable: bool, world: World) -> None:
    """Raise if the stream depends on the rank, else warn. All ranks must call it. [Note: rows by rank]

    Args:
        name: what the stream is called.
        epoch: the epoch of the row that differs.
        row: its number in the epoch.
        mark: its mark on this rank.
        is_repeatable: this rank reads the same row again.
        world: this rank's place in the job.
    """
    rows = [RowOfRank(*values) for values in all_gather_object([world.node, mark, is_repeatable])]
    other = next(rank for rank, each in enumerate(rows) if each.mark != rows[0].mark)
    what = f"the stream {name}: row {row} of epoch {epoch} is not the same on rank {other} as on rank 0"
    if _depends_on_rank(rows):
        raise UserError(
            f"{what}, so the stream depends on the rank and would be sharded twice: yield every row on every rank "
            "(without get_rank, RANK or split_dataset_by_node), because lockstep hands them out"
        )
    if world.is_main:
        logger.warning(
            "%s, so rows may be missing or repeated: yield the same rows in the same order on every rank, and draw "
            "random numbers from the global generators, which lockstep seeds",
            what,
        )


def _depends_on_rank(rows: Sequence[RowOfRank]) -> bool:
    by_node: dict[int, set[int]] = {}
    for each in rows:
        by_node.setdefault(each.node, set()).add(each.mark)
    return all(each.is_repeatable for each in rows) and any(len(marks) > 1 for marks in by_node.values())
