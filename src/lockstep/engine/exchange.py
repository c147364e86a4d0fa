"""Sums between ranks, added up along the tree [Note: tree], in place.

Both algorithms scatter the sums (each rank adds up a part of the buffer) and then gather them. Where a buffer is cut
does not matter to the bits, because each element is added by itself.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

from torch import Tensor

from lockstep.data.lanes import Lanes
from lockstep.engine.channel import Channel, Message
from lockstep.engine.tree import TreeSum, cover

Finish = Callable[[Tensor, int], None]
"""What is done to each element once it is summed: given a part of the buffer, and where in the buffer it begins."""


class Exchange(Protocol):
    def sum(self, parts: Sequence[Tensor], finish: Finish) -> Tensor:
        """Sum over all ranks. `parts` are this rank's tree nodes, flat and equally long; the result is in the first."""
        ...


class RecursiveHalving:
    """For 2^k ranks with equally many lanes each: a ring's bytes, in k steps there and k back.

    Step d exchanges with the rank whose subtree is the sibling of ours, so the additions are the tree's own. Each keeps
    a half of what it had, and the way back doubles it again.
    """

    def __init__(self, channel: Channel, rank: int, num_ranks: int) -> None:
        self._channel = channel
        self._rank = rank
        self._num_ranks = num_ranks

    def sum(self, parts: Sequence[Tensor], finish: Finish) -> Tensor:
        (flat,) = parts
        segments = [(0, flat.numel())]
        distance = 1
        received = self._channel.scratch(flat, (flat.numel() + 1) // 2)
        while distance < self._num_ranks:
            (start, stop), peer = segments[-1], self._rank ^ distance
            middle = (start + stop) // 2
            kept, given = ((start, middle), (middle, stop)) if self._rank < peer else ((middle, stop), (start, middle))
            incoming = received[: kept[1] - kept[0]]
            self._channel.exchange([Message(peer, flat[slice(*given)])], [Message(peer, incoming)])
            flat[slice(*kept)].add_(incoming)
            segments.append(kept)
            distance *= 2
        own = segments.pop()
        finish(flat[slice(*own)], own[0])
        while distance > 1:
            distance //= 2
            start, stop = segments.pop()
            missing = (own[1], stop) if own[0] == start else (start, own[0])
            peer = self._rank ^ distance
            self._channel.exchange([Message(peer, flat[slice(*own)])], [Message(peer, flat[slice(*missing)])])
            own = (start, stop)
        return flat


class AlignedNodes:
    """For any number of ranks and any blocks of lanes.

    Each rank sends a part of each of its tree nodes to the rank that adds up that part; then the sums travel back. As
    many bytes as a ring's where every rank has one node; more nodes, more bytes on the way there.
    """

    def __init__(self, channel: Channel, rank: int, lanes: Lanes) -> None:
        self._channel = channel
        self._rank = rank
        self._nodes = [cover(share) for share in lanes.shares]

    def sum(self, parts: Sequence[Tensor], finish: Finish) -> Tensor:
        num_ranks = len(self._nodes)
        length = parts[0].numel()
        bounds = [length * rank // num_ranks for rank in range(num_ranks + 1)]
        slices = [slice(start, stop) for start, stop in pairwise(bounds)]
        others = [rank for rank in range(num_ranks) if rank != self._rank]
        mine = slices[self._rank]

        num_received = sum(len(self._nodes[rank]) for rank in others)
        own_length = mine.stop - mine.start
        scratch = iter(self._channel.scratch(parts[0], num_received * own_length).view(num_received, own_length))
        received = {rank: [next(scratch) for _ in self._nodes[rank]] for rank in others}
        self._channel.exchange(
            [Message(rank, part[slices[rank]]) for rank in others for part in parts],
            [Message(rank, part) for rank in others for part in received[rank]],
        )
        received[self._rank] = [part[mine] for part in parts]
        sums: TreeSum[Tensor] = TreeSum(Tensor.add_)
        for rank, nodes in enumerate(self._nodes):
            for node, part in zip(nodes, received[rank], strict=True):
                sums.push(node, part)
        total = sums.total()
        finish(total, mine.start)
        result = parts[0]
        if total.data_ptr() != result[mine].data_ptr():
            result[mine].copy_(total)
        self._channel.exchange(
            [Message(rank, result[mine]) for rank in others], [Message(rank, result[slices[rank]]) for rank in others]
        )
        return result


def choose_exchange(channel: Channel, rank: int, lanes: Lanes) -> Exchange:
    num_ranks = len(lanes.shares)
    is_power_of_two = num_ranks & (num_ranks - 1) == 0
    if is_power_of_two and len({len(share) for share in lanes.shares}) == 1:
        return RecursiveHalving(channel, rank, num_ranks)
    return AlignedNodes(channel, rank, lanes)
