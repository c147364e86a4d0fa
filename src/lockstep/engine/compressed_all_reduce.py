"""All-reduce of compressed numbers, for fast mode: the mean over all ranks, on every rank.

Each rank receives its own chunk of every rank's numbers, adds them in the order of the ranks, and sends the mean to
all. So sums are taken in full precision, whatever is sent; an element's sum does not depend on its place in a buffer;
and all ranks get the same bits, because they decode the same message.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from lockstep.engine.comm_thread import CommThread, Message
from lockstep.engine.gradient_math import accumulation_dtype
from lockstep.engine.tree_all_reduce import even_bounds
from lockstep.world.world import World

_ALIGNMENT = 16  # bytes: enough for any dtype
_HEADER = 4  # bytes: a scale in single precision


class Encoding(Protocol):
    """How numbers are represented in a message."""

    def num_bytes(self, length: int) -> int:
        """Return how many bytes `length` numbers take."""
        ...

    def encode(self, numbers: Tensor, message: Tensor) -> None:
        """Write numbers into a message of `num_bytes` bytes."""
        ...

    def decode(self, message: Tensor) -> Tensor:
        """Return the numbers of a message, in at least single precision."""
        ...


@dataclass(frozen=True)
class Uncompressed:
    """Numbers in their own dtype."""

    dtype: torch.dtype

    def num_bytes(self, length: int) -> int:
        return length * self.dtype.itemsize

    def encode(self, numbers: Tensor, message: Tensor) -> None:
        message.view(self.dtype).copy_(numbers)

    def decode(self, message: Tensor) -> Tensor:
        return message.view(self.dtype).to(accumulation_dtype(self.dtype))


@dataclass(frozen=True)
class ScaledHalf:
    """Two bytes for each number, scaled by a power of two that brings the largest near the upper end of fp16's range.

    So neither a sum over many samples nor a mean over a large count leaves fp16's narrow range. Nor does it matter that
    the size of the losses may change from one pass to the next [Note: guessed count].
    """

    dtype: torch.dtype

    def num_bytes(self, length: int) -> int:
        return _HEADER + length * self.dtype.itemsize if length else 0

    def encode(self, numbers: Tensor, message: Tensor) -> None:
        if not numbers.numel():
            return
        largest = numbers.abs().amax().float()
        exponent = torch.frexp(largest).exponent
        # An infinity or a NaN has no exponent: it is sent unscaled, so that the finite check finds it.
        scale = torch.ldexp(torch.ones_like(largest), (15 - exponent).clamp(-126, 126))
        scale = torch.where(largest.isfinite(), scale, torch.ones_like(scale))
        message[:_HEADER].view(torch.float32).copy_(scale)
        message[_HEADER:].view(self.dtype).copy_(numbers * scale)

    def decode(self, message: Tensor) -> Tensor:
        if not message.numel():
            return message.new_empty(0, dtype=torch.float32)
        return message[_HEADER:].view(self.dtype).float() / message[:_HEADER].view(torch.float32)


class CompressedAllReduce:
    """Averages flat tensors over all ranks. Used by jobs on the communication thread."""

    def __init__(self, comm: CommThread, world: World) -> None:
        self.comm = comm
        self.world = world
        self._others = [rank for rank in range(world.size) if rank != world.rank]

    def average(self, flat: Tensor, encoding: Encoding) -> None:
        """Replace a tensor by its mean over all ranks."""
        world, others = self.world, self._others
        chunks = [flat[start:stop] for start, stop in pairwise(even_bounds(flat.numel(), world.size))]
        sizes = [encoding.num_bytes(chunk.numel()) for chunk in chunks]
        outgoing, incoming = self._messages(max(sizes), 0), self._messages(max(sizes), 1)
        for rank in others:
            self._encode(encoding, chunks[rank], outgoing[rank][: sizes[rank]])
        own, own_size = chunks[world.rank], sizes[world.rank]
        self.comm.exchange(
            [Message(rank, outgoing[rank][: sizes[rank]]) for rank in others],
            [Message(rank, incoming[rank][:own_size]) for rank in others],
        )
        total = torch.zeros_like(own, dtype=accumulation_dtype(flat.dtype))
        for rank in range(world.size):
            total += own if rank == world.rank else self._decode(encoding, incoming[rank][:own_size], flat)
        total /= world.size
        mean = outgoing[world.rank][:own_size]
        self._encode(encoding, total, mean)
        self.comm.exchange(
            [Message(rank, mean) for rank in others],
            [Message(rank, incoming[rank][: sizes[rank]]) for rank in others],
        )
        for rank, chunk in enumerate(chunks):
            message = mean if rank == world.rank else incoming[rank][: sizes[rank]]
            chunk.copy_(self._decode(encoding, message, flat))

    def uncompressed_bytes(self, flat: Tensor) -> int:
        """Return how many bytes this rank would send without compression."""
        lengths = [stop - start for start, stop in pairwise(even_bounds(flat.numel(), self.world.size))]
        own = lengths.pop(self.world.rank)
        return flat.element_size() * (sum(lengths) + own * len(lengths))

    def _messages(self, size: int, index: int) -> Tensor:
        """Return buffer 0 or 1: a row of `size` or more bytes for each rank. Both are valid until the next job."""
        row = -(-size // _ALIGNMENT) * _ALIGNMENT
        like = torch.empty(0, dtype=torch.uint8, device=self.comm.device)
        return self.comm.scratch(like, 2 * self.world.size * row).view(2, self.world.size, row)[index]

    def _encode(self, encoding: Encoding, numbers: Tensor, message: Tensor) -> None:
        if numbers.device == message.device:
            encoding.encode(numbers, message)
        else:  # gloo sends from host memory only
            on_device = torch.empty_like(message, device=numbers.device)
            encoding.encode(numbers, on_device)
            message.copy_(on_device)

    def _decode(self, encoding: Encoding, message: Tensor, like: Tensor) -> Tensor:
        return encoding.decode(message.to(like.device))
