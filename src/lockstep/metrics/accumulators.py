"""Accumulators: how a metric's values are collected over the chunks of a rank and combined over all ranks.

[Note: chunk order] An evaluation is split into chunks that do not depend on the number of ranks; which rank runs which
chunk does. So nothing may be rounded on one rank that another split would round differently: values are kept apart
until all of them are in chunk order (`RowAccumulator`, `PieceAccumulator`), or they are added along a fixed tree over
the chunks (`MergedAccumulator`), where a rank makes only additions that every other split makes too.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.engine.lane_tree import TreeNode, TreeSum, leaf
from lockstep.errors import UserError


class Accumulator(Protocol):
    """Collects one value per chunk on each rank, and combines those of all ranks."""

    def add(self, chunk: int, value: Any) -> None:
        """Add a chunk's value; must not wait for the device."""
        ...

    def packet(self) -> Any:
        """All that this rank has collected, ready to be sent."""
        ...

    def merged(self, packets: Sequence[Any]) -> Any:
        """The values of all chunks combined, on the CPU. Called on the rank that has the first chunk."""
        ...


class RowAccumulator:
    """One small row of numbers per chunk, all of the same shape → one tensor of all rows, in chunk order."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}

    def add(self, chunk: int, value: Tensor) -> None:
        """Add a chunk's row."""
        _check_same_shape(next(iter(self._rows.values()), value).shape, value.shape)
        self._rows[chunk] = value.detach()

    def packet(self) -> Any:
        """This rank's rows, and their chunks."""
        return {"chunks": list(self._rows), "rows": torch.stack(list(self._rows.values()))}

    def merged(self, packets: Sequence[Any]) -> Tensor:
        """The rows of all ranks, of shape (chunks, …)."""
        for packet in packets:
            _check_same_shape(packets[0]["rows"].shape[1:], packet["rows"].shape[1:])
        order = torch.tensor([chunk for packet in packets for chunk in packet["chunks"]]).argsort()
        return torch.cat([packet["rows"] for packet in packets])[order]


class PieceAccumulator:
    """One or a few tensors per chunk, of any length → a list of them for each chunk, in chunk order."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[Tensor]] = {}

    def add(self, chunk: int, value: Tensor | list[Tensor]) -> None:
        """Add a chunk's tensor or tensors."""
        self._pieces[chunk] = [value] if isinstance(value, Tensor) else value

    def packet(self) -> Any:
        """This rank's tensors, packed, and how many each chunk has."""
        counts = [[chunk, len(pieces)] for chunk, pieces in self._pieces.items()]
        return {"counts": counts, **pack([piece for pieces in self._pieces.values() for piece in pieces])}

    def merged(self, packets: Sequence[Any]) -> list[list[Tensor]]:
        """The tensors of all ranks, by chunk."""
        by_chunk: dict[int, list[Tensor]] = {}
        for packet in packets:
            pieces = iter(unpack(packet))
            for chunk, count in packet["counts"]:
                by_chunk[chunk] = [next(pieces) for _ in range(count)]
        return [by_chunk[chunk] for chunk in sorted(by_chunk)]


class MergedAccumulator:
    """One tensor per chunk, however large → all merged by `merge`, in pairs along a fixed tree over the chunks.

    For n chunks a rank holds at most 2·log2(n) tensors. Sums are computed in fp64, or in int64 for integers.
    """

    def __init__(self, merge: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        self._merge = merge
        self._tree = TreeSum(merge)
        self._dtype: torch.dtype | None = None

    def add(self, chunk: int, value: Tensor) -> None:
        """Add a chunk's tensor."""
        self._dtype = self._dtype or value.dtype
        self._tree.push(leaf(chunk), _widened(value.detach()))

    def packet(self) -> Any:
        """This rank's partial sums, packed, and their nodes in the tree."""
        return {"nodes": [list(node) for node, _ in self._tree], **pack([value for _, value in self._tree])}

    def merged(self, packets: Sequence[Any]) -> Tensor:
        """The merged tensor, rounded once to the type of the first value."""
        nodes = [
            (TreeNode(*node), value)
            for packet in packets
            for node, value in zip(packet["nodes"], unpack(packet), strict=True)
        ]
        tree = TreeSum(self._merge)
        for node, value in sorted(nodes, key=lambda item: item[0].position << item[0].level):
            tree.push(node, value)
        total = functools.reduce(self._merge, (value for _, value in tree))
        return total if self._dtype is None or self._dtype is torch.bool else total.to(self._dtype)


class GroupedAccumulator:
    """Several accumulators by name, for values that are mappings with the same names."""

    def __init__(self, accumulators: Mapping[str, Accumulator]) -> None:
        self._accumulators = dict(accumulators)

    def add(self, chunk: int, value: Mapping[str, Any]) -> None:
        """Add each element of a chunk's value to the accumulator of its name."""
        for name, accumulator in self._accumulators.items():
            accumulator.add(chunk, value[name])

    def packet(self) -> Any:
        """The packets of all accumulators, by name."""
        return {name: accumulator.packet() for name, accumulator in self._accumulators.items()}

    def merged(self, packets: Sequence[Any]) -> dict[str, Any]:
        """What each accumulator has collected, by name."""
        return {
            name: accumulator.merged([packet[name] for packet in packets])
            for name, accumulator in self._accumulators.items()
        }


def pack(tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Many tensors as one flat tensor per dtype, with their shapes: so they leave the device in few copies."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    dtypes = list(by_dtype)
    return {
        "shapes": [list(tensor.shape) for tensor in tensors],
        "types": [dtypes.index(tensor.dtype) for tensor in tensors],
        "flat": [torch.cat([tensor.detach().reshape(-1) for tensor in group]) for group in by_dtype.values()],
    }


def unpack(packed: dict[str, Any]) -> list[Tensor]:
    """The tensors given to `pack`, in the same order."""
    starts = [0] * len(packed["flat"])
    tensors = []
    for shape, dtype_index in zip(packed["shapes"], packed["types"], strict=True):
        start, size = starts[dtype_index], math.prod(shape)
        tensors.append(packed["flat"][dtype_index][start : start + size].reshape(shape))
        starts[dtype_index] += size
    return tensors


def _widened(value: Tensor) -> Tensor:
    if value.is_floating_point():
        return value.double()
    return value if value.is_complex() else value.long()


def _check_same_shape(first: torch.Size, other: torch.Size) -> None:
    if first != other:
        raise UserError(
            f"one batch gave numbers of shape {tuple(first)}, another of shape {tuple(other)}: "
            "only the number of samples may differ"
        )
