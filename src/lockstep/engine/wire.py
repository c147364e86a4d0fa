"""Fast mode's own way between ranks, for numbers that travel packed: their mean over all ranks, on every rank.

Each rank gets its own part of everybody's numbers, adds them up in the order of the ranks, and sends the mean to all.
So sums are taken in full precision, whatever travels; an element's sum does not depend on its place in a buffer; and
all ranks come to the same bits, for they unpack the same.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from lockstep.engine.channel import Channel, Message
from lockstep.engine.exchange import even_cuts
from lockstep.world.world import World

_ALIGNED = 16  # bytes: where any type of number may begin
_HEADER = 4  # bytes: a scale, in single precision


class Packing(Protocol):
    """What numbers are on their way."""

    def num_bytes(self, length: int) -> int:
        """That so many numbers take."""
        ...

    def pack(self, numbers: Tensor, room: Tensor) -> None: ...

    def unpack(self, room: Tensor) -> Tensor:
        """In at least single precision."""
        ...


@dataclass(frozen=True)
class AsTheyAre:
    dtype: torch.dtype

    def num_bytes(self, length: int) -> int:
        return length * self.dtype.itemsize

    def pack(self, numbers: Tensor, room: Tensor) -> None:
        room.view(self.dtype).copy_(numbers)

    def unpack(self, room: Tensor) -> Tensor:
        return room.view(self.dtype).to(computed_in(self.dtype))


@dataclass(frozen=True)
class Halves:
    """Two bytes a number, after a power of two that brings the largest to the upper end of what fp16 can hold.

    So neither a sum over many samples nor a mean that was divided by a large count leaves fp16's narrow range: it does
    not matter how large losses are, which may change from one pass to the next [Note: guessed count].
    """

    dtype: torch.dtype

    def num_bytes(self, length: int) -> int:
        return _HEADER + length * self.dtype.itemsize if length else 0

    def pack(self, numbers: Tensor, room: Tensor) -> None:
        if not numbers.numel():
            return
        largest = numbers.abs().amax().float()
        exponent = torch.frexp(largest).exponent
        # An infinity or a NaN has no exponent; it travels as it is, for somebody to find.
        scale = torch.ldexp(torch.ones_like(largest), (15 - exponent).clamp(-126, 126))
        scale = torch.where(largest.isfinite(), scale, torch.ones_like(scale))
        room[:_HEADER].view(torch.float32).copy_(scale)
        room[_HEADER:].view(self.dtype).copy_(numbers * scale)

    def unpack(self, room: Tensor) -> Tensor:
        if not room.numel():
            return room.new_empty(0, dtype=torch.float32)
        return room[_HEADER:].view(self.dtype).float() / room[:_HEADER].view(torch.float32)


class Wire:
    """Used by the channel's jobs."""

    def __init__(self, channel: Channel, world: World) -> None:
        self.channel = channel
        self.world = world
        self._others = [rank for rank in range(world.size) if rank != world.rank]

    def average(self, flat: Tensor, packing: Packing) -> None:
        """The mean over all ranks, in place."""
        world, others = self.world, self._others
        parts = [flat[start:stop] for start, stop in pairwise(even_cuts(flat.numel(), world.size))]
        sizes = [packing.num_bytes(part.numel()) for part in parts]
        outgoing, incoming = self._room(max(sizes), 0), self._room(max(sizes), 1)
        for rank in others:
            self._pack(packing, parts[rank], outgoing[rank][: sizes[rank]])
        own, own_size = parts[world.rank], sizes[world.rank]
        self.channel.exchange(
            [Message(rank, outgoing[rank][: sizes[rank]]) for rank in others],
            [Message(rank, incoming[rank][:own_size]) for rank in others],
        )
        total = torch.zeros_like(own, dtype=computed_in(flat.dtype))
        for rank in range(world.size):
            total += own if rank == world.rank else self._unpack(packing, incoming[rank][:own_size], flat)
        total /= world.size
        mean = outgoing[world.rank][:own_size]
        self._pack(packing, total, mean)
        self.channel.exchange(
            [Message(rank, mean) for rank in others],
            [Message(rank, incoming[rank][: sizes[rank]]) for rank in others],
        )
        for rank, part in enumerate(parts):
            room = mean if rank == world.rank else incoming[rank][: sizes[rank]]
            part.copy_(self._unpack(packing, room, flat))

    def bytes_as_they_are(self, flat: Tensor) -> int:
        """What this rank would send if nothing was packed."""
        lengths = [stop - start for start, stop in pairwise(even_cuts(flat.numel(), self.world.size))]
        own = lengths.pop(self.world.rank)
        return flat.element_size() * (sum(lengths) + own * len(lengths))

    def _room(self, size: int, number: int) -> Tensor:
        """A row of bytes for each rank; there are two such rooms, which are valid until the next job."""
        row = -(-size // _ALIGNED) * _ALIGNED
        like = torch.empty(0, dtype=torch.uint8, device=self.channel.carrier)
        return self.channel.scratch(like, 2 * self.world.size * row).view(2, self.world.size, row)[number]

    def _pack(self, packing: Packing, numbers: Tensor, room: Tensor) -> None:
        if numbers.device == room.device:
            packing.pack(numbers, room)
        else:  # gloo sends from main memory only
            there = torch.empty_like(room, device=numbers.device)
            packing.pack(numbers, there)
            room.copy_(there)

    def _unpack(self, packing: Packing, room: Tensor, like: Tensor) -> Tensor:
        return packing.unpack(room.to(like.device))


def computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
