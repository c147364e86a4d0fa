"""Sums between ranks, added up along the tree [Note: tree], in place.

A sum is scattered (each rank adds up a part of the buffer) and then gathered; between two ranks, whole buffers change
hands instead. Where a buffer is cut does not matter to
the bits, because each element is added by itself: so a caller may cut it where it likes, and do something with its own
part in between.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lockstep.data.lanes import Lanes
from lockstep.engine.channel import Channel, Message
from lockstep.engine.tree import TreeSum, cover

Finish = Callable[[Tensor, int], None]
"""What is done to each element once it is summed: given a part of the buffer, and where in the buffer it begins."""

Cuts = Sequence[int]
"""Where a buffer is cut into a part for each rank: from 0 to its length, a number more than there are ranks."""


class Exchange(Protocol):
    num_ranks: int
    place: int  # of this rank's part, among all parts of a buffer

    def sum(self, parts: Sequence[Tensor], finish: Finish) -> Tensor:
        """The sum over all ranks, on every rank. `parts` are this rank's tree nodes, flat and equally long; it is in
        the first of them."""
        ...

    def scatter(self, parts: Sequence[Tensor], cuts: Cuts) -> None:
        """The same for this rank's own part of the buffer alone; the rest is spoilt."""
        ...

    def gather(self, flat: Tensor, cuts: Cuts) -> None:
        """Every rank's own part of the buffer becomes everybody's."""
        ...


def place_of(rank: int, num_ranks: int) -> int:
    """Of the part of a buffer that a rank adds up: where halving leads to, its number with the bits reversed. It is so
    for all exchanges between 2^k ranks, so that what a rank has does not depend on how lanes are shared out."""
    num_bits = (num_ranks - 1).bit_length()
    if 1 << num_bits != num_ranks:
        return rank
    return sum((rank >> bit & 1) << (num_bits - 1 - bit) for bit in range(num_bits))


def own_part(exchange: Exchange, cuts: Cuts) -> slice:
    return slice(cuts[exchange.place], cuts[exchange.place + 1])


def even_cuts(length: int, num_ranks: int) -> list[int]:
    return [length * place // num_ranks for place in range(num_ranks + 1)]


def _sum_by_parts(exchange: Exchange, parts: Sequence[Tensor], finish: Finish) -> Tensor:
    cuts = even_cuts(parts[0].numel(), exchange.num_ranks)
    own = own_part(exchange, cuts)
    exchange.scatter(parts, cuts)
    finish(parts[0][own], own.start)
    exchange.gather(parts[0], cuts)
    return parts[0]


class RecursiveHalving:
    """For 2^k ranks with equally many lanes each: a ring's bytes, in k steps there and k back.

    Step d exchanges with the rank whose subtree is the sibling of ours, so the additions are the tree's own. Each keeps
    a half of the parts that it had, and the way back doubles them again.
    """

    def __init__(self, channel: Channel, rank: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._channel = channel
        self._rank = rank
        self.place = place_of(rank, num_ranks)
        self._halves = self._halved()

    def sum(self, parts: Sequence[Tensor], finish: Finish) -> Tensor:
        return _sum_by_parts(self, parts, finish)

    def scatter(self, parts: Sequence[Tensor], cuts: Cuts) -> None:
        (flat,) = parts
        longest = max((_length(kept, cuts) for kept, _, _ in self._halves[1:]), default=0)
        received = self._channel.scratch(flat, longest)
        for kept, given, peer in self._halves[1:]:
            incoming = received[: _length(kept, cuts)]
            self._channel.exchange([Message(peer, flat[_between(given, cuts)])], [Message(peer, incoming)])
            flat[_between(kept, cuts)].add_(incoming)

    def gather(self, flat: Tensor, cuts: Cuts) -> None:
        for kept, given, peer in reversed(self._halves[1:]):
            self._channel.exchange(
                [Message(peer, flat[_between(kept, cuts)])], [Message(peer, flat[_between(given, cuts)])]
            )

    def _halved(self) -> list[tuple[range, range, int]]:
        """Step by step: the places that this rank keeps, those that it gives away, and to whom."""
        steps = [(range(self.num_ranks), range(0), self._rank)]
        distance = 1
        while distance < self.num_ranks:
            places, peer = steps[-1][0], self._rank ^ distance
            lower, upper = places[: len(places) // 2], places[len(places) // 2 :]
            steps.append((lower, upper, peer) if self._rank < peer else (upper, lower, peer))
            distance *= 2
        return steps


class Swap(RecursiveHalving):
    """For two ranks with equally many lanes: each sends all that it has, and both add up.

    The bytes are those of halving, in one message instead of two, one after the other. In a small buffer nearly all of
    the time is that of a message.
    """

    def sum(self, parts: Sequence[Tensor], finish: Finish) -> Tensor:
        (flat,) = parts
        incoming, peer = self._channel.scratch(flat, flat.numel()), 1 - self._rank
        self._channel.exchange([Message(peer, flat)], [Message(peer, incoming)])
        # In the tree's order on both: of two NaNs, a sum has the first one's bits.
        left, right = (flat, incoming) if self._rank < peer else (incoming, flat)
        torch.add(left, right, out=flat)
        finish(flat, 0)
        return flat


class AlignedNodes:
    """For any number of ranks and any blocks of lanes.

    Each rank sends a part of each of its tree nodes to the rank that adds up that part; then the sums travel back. As
    many bytes as a ring's where every rank has one node; more nodes, more bytes on the way there.
    """

    def __init__(self, channel: Channel, rank: int, lanes: Lanes) -> None:
        self._nodes = [cover(share) for share in lanes.shares]
        self.num_ranks = len(self._nodes)
        self.place = place_of(rank, self.num_ranks)
        self._channel = channel
        self._rank = rank
        self._others = [other for other in range(self.num_ranks) if other != rank]

    def sum(self, parts: Sequence[Tensor], finish: Finish) -> Tensor:
        return _sum_by_parts(self, parts, finish)

    def scatter(self, parts: Sequence[Tensor], cuts: Cuts) -> None:
        slices = self._slices(cuts)
        mine = slices[self._rank]
        num_received = sum(len(self._nodes[rank]) for rank in self._others)
        own_length = mine.stop - mine.start
        scratch = iter(self._channel.scratch(parts[0], num_received * own_length).view(num_received, own_length))
        received = {rank: [next(scratch) for _ in self._nodes[rank]] for rank in self._others}
        self._channel.exchange(
            [Message(rank, part[slices[rank]]) for rank in self._others for part in parts],
            [Message(rank, part) for rank in self._others for part in received[rank]],
        )
        received[self._rank] = [part[mine] for part in parts]
        sums: TreeSum[Tensor] = TreeSum(Tensor.add_)
        for rank, nodes in enumerate(self._nodes):
            for node, part in zip(nodes, received[rank], strict=True):
                sums.push(node, part)
        total, result = sums.total(), parts[0][mine]
        if total.data_ptr() != result.data_ptr():
            result.copy_(total)

    def gather(self, flat: Tensor, cuts: Cuts) -> None:
        slices = self._slices(cuts)
        mine = flat[slices[self._rank]]
        self._channel.exchange(
            [Message(rank, mine) for rank in self._others], [Message(rank, flat[slices[rank]]) for rank in self._others]
        )

    def _slices(self, cuts: Cuts) -> list[slice]:
        """Each rank's part of a buffer."""
        places = [place_of(rank, self.num_ranks) for rank in range(self.num_ranks)]
        return [slice(cuts[place], cuts[place + 1]) for place in places]


def choose_exchange(channel: Channel, rank: int, lanes: Lanes) -> Exchange:
    num_ranks = len(lanes.shares)
    is_power_of_two = num_ranks & (num_ranks - 1) == 0
    if is_power_of_two and len({len(share) for share in lanes.shares}) == 1:
        return (Swap if num_ranks == 2 else RecursiveHalving)(channel, rank, num_ranks)
    return AlignedNodes(channel, rank, lanes)


def _between(places: range, cuts: Cuts) -> slice:
    return slice(cuts[places.start], cuts[places.stop])


def _length(places: range, cuts: Cuts) -> int:
    return cuts[places.stop] - cuts[places.start]
