"""Keepers: how values of one kind are collected over the chunks of a rank, and put together over all ranks.

[Note: chunk order] Chunks do not depend on the number of ranks; which rank has which does. So nothing is rounded on a
rank that would be rounded differently elsewhere: values stay apart until all are in chunk order (`Rows`, `Pieces`), or
are added along the fixed tree over chunks (`Merged`), where a rank does only additions that every other split does too.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from lockstep.engine.tree import Node, TreeSum, leaf
from lockstep.errors import UserError
from lockstep.metrics.packing import pack, unpack


class Keeper(Protocol):
    def add(self, chunk: int, value: Any) -> None:
        """Take in a chunk's value; nothing is fetched from the device."""
        ...

    def packet(self) -> Any:
        """All that this rank has, ready to travel."""
        ...

    def merged(self, packets: Sequence[Any]) -> Any:
        """The values of all chunks put together, on the CPU. Asked on the rank that has the first chunk."""
        ...


class Rows:
    """One small row of numbers a chunk, all of one shape → one tensor of all rows, in chunk order."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}

    def add(self, chunk: int, value: Tensor) -> None:
        _check_alike(next(iter(self._rows.values()), value).shape, value.shape)
        self._rows[chunk] = value.detach()

    def packet(self) -> Any:
        return {"chunks": list(self._rows), "rows": torch.stack(list(self._rows.values()))}

    def merged(self, packets: Sequence[Any]) -> Tensor:
        for packet in packets:
            _check_alike(packets[0]["rows"].shape[1:], packet["rows"].shape[1:])
        order = torch.tensor([chunk for packet in packets for chunk in packet["chunks"]]).argsort()
        return torch.cat([packet["rows"] for packet in packets])[order]


class Pieces:
    """One or a few tensors a chunk, of any length → for each chunk, in order, the list of them."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[Tensor]] = {}

    def add(self, chunk: int, value: Tensor | list[Tensor]) -> None:
        self._pieces[chunk] = [value] if isinstance(value, Tensor) else value

    def packet(self) -> Any:
        counts = [[chunk, len(pieces)] for chunk, pieces in self._pieces.items()]
        return {"counts": counts, **pack([piece for pieces in self._pieces.values() for piece in pieces])}

    def merged(self, packets: Sequence[Any]) -> list[list[Tensor]]:
        by_chunk: dict[int, list[Tensor]] = {}
        for packet in packets:
            pieces = iter(unpack(packet))
            for chunk, count in packet["counts"]:
                by_chunk[chunk] = [next(pieces) for _ in range(count)]
        return [by_chunk[chunk] for chunk in sorted(by_chunk)]


class Merged:
    """One tensor a chunk, however large → all merged by `merge`, in pairs along the fixed tree over chunks.

    A rank keeps a logarithm of its chunks' number of them, at most twice. Sums are taken in fp64, or in whole numbers.
    """

    def __init__(self, merge: Callable[[Tensor, Tensor], Tensor] = torch.add) -> None:
        self._merge = merge
        self._tree = TreeSum(merge)
        self._type: torch.dtype | None = None

    def add(self, chunk: int, value: Tensor) -> None:
        self._type = self._type or value.dtype
        self._tree.push(leaf(chunk), _widened(value.detach()))

    def packet(self) -> Any:
        return {"nodes": [list(node) for node, _ in self._tree], **pack([value for _, value in self._tree])}

    def merged(self, packets: Sequence[Any]) -> Tensor:
        nodes = [
            (Node(*node), value)
            for packet in packets
            for node, value in zip(packet["nodes"], unpack(packet), strict=True)
        ]
        tree = TreeSum(self._merge)
        for node, value in sorted(nodes, key=lambda item: item[0].place << item[0].level):
            tree.push(node, value)
        total = functools.reduce(self._merge, (value for _, value in tree))
        return total if self._type is None or self._type is torch.bool else total.to(self._type)


class Together:
    """Several keepers under names, for a value that has parts by the same names."""

    def __init__(self, keepers: Mapping[str, Keeper]) -> None:
        self._keepers = dict(keepers)

    def add(self, chunk: int, value: Mapping[str, Any]) -> None:
        for name, keeper in self._keepers.items():
            keeper.add(chunk, value[name])

    def packet(self) -> Any:
        return {name: keeper.packet() for name, keeper in self._keepers.items()}

    def merged(self, packets: Sequence[Any]) -> dict[str, Any]:
        return {name: keeper.merged([packet[name] for packet in packets]) for name, keeper in self._keepers.items()}


def _widened(value: Tensor) -> Tensor:
    if value.is_floating_point():
        return value.double()
    return value if value.is_complex() else value.long()


def _check_alike(first: torch.Size, other: torch.Size) -> None:
    if first != other:
        raise UserError(
            f"one batch gave numbers of shape {tuple(first)}, another of shape {tuple(other)}: "
            "only the number of samples may differ"
        )
