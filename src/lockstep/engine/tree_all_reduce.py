"""All-reduce along the lanes' tree: the same bits on any number of ranks. [Note: tree]

A ring all-reduce adds up in an order that depends on the number of ranks. These algorithms add in the tree's order:

    TwoRankExchange            2 ranks      each sends its whole buffer; both add
    RecursiveHalvingDoubling   2^k ranks    reduce-scatter by recursive halving, all-gather by recursive doubling
    DirectExchange             any          reduce-scatter and all-gather by direct messages between all pairs of ranks

The first two need equally many lanes on each rank: then each rank's lanes are one subtree, and the rank at distance 1,
2, 4, … has the sibling of what was added so far. With four ranks and lanes a, b, c, d, and a buffer cut into chunks 0
to 3, rank 0 takes part like this:

    reduce-scatter   exchange halves with rank 1: keep chunks 0 1, give 2 3     chunks 0 1: a + b
                     exchange halves with rank 2: keep chunk 0, give 1          chunk 0: (a + b) + (c + d)
    all-gather       the same exchanges in reverse, with finished chunks        all chunks: (a + b) + (c + d)

Every element is summed by itself, so the bits do not depend on where a buffer is cut. A caller may choose the bounds of
the chunks, and work on its own chunk between `reduce_scatter` and `all_gather`; ZeRO does both.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lockstep.data.lanes import Lanes
from lockstep.engine.comm_thread import CommThread, Message
from lockstep.engine.lane_tree import TreeSum, covering_nodes

OnSummed = Callable[[Tensor, int], None]
"""Called once for each summed chunk, with the chunk and where in the buffer it starts: it may change it in place."""

Bounds = Sequence[int]
"""Where a buffer is cut into one chunk for each rank: from 0 to its length, one number more than there are ranks."""


class TreeAllReduce(Protocol):
    """Sums flat buffers over all ranks along the tree, in place."""

    num_ranks: int
    own_chunk: int  # index of the chunk that this rank adds up

    def all_reduce(self, buffers: Sequence[Tensor], on_summed: OnSummed) -> Tensor:
        """Leave the sum over all ranks in the first buffer of every rank, and return that buffer.

        Args:
            buffers: this rank's partial sums, one for each subtree of its lanes; flat and equally long.
            on_summed: called with each summed chunk before it is sent to the other ranks.
        """
        ...

    def reduce_scatter(self, buffers: Sequence[Tensor], bounds: Bounds) -> None:
        """Leave the sum of this rank's own chunk in the first buffer. The other chunks hold garbage afterwards."""
        ...

    def all_gather(self, flat: Tensor, bounds: Bounds) -> None:
        """Send every rank's own chunk to all ranks."""
        ...


def chunk_of_rank(rank: int, num_ranks: int) -> int:
    """Return the index of the chunk that a rank adds up.

    Between 2^k ranks it is the one that recursive halving ends at: the rank's number with its bits reversed. All
    algorithms agree on that, so a rank's chunk does not depend on how the lanes are shared out.
    """
    num_bits = (num_ranks - 1).bit_length()
    if 1 << num_bits != num_ranks:
        return rank
    return sum((rank >> bit & 1) << (num_bits - 1 - bit) for bit in range(num_bits))


def own_slice(algorithm: TreeAllReduce, bounds: Bounds) -> slice:
    """Return the slice of a buffer that this rank adds up."""
    return slice(bounds[algorithm.own_chunk], bounds[algorithm.own_chunk + 1])


def even_bounds(length: int, num_ranks: int) -> list[int]:
    """Return bounds that cut a buffer into chunks as equal as possible."""
    return [length * chunk // num_ranks for chunk in range(num_ranks + 1)]


def _reduce_scatter_then_gather(algorithm: TreeAllReduce, buffers: Sequence[Tensor], on_summed: OnSummed) -> Tensor:
    bounds = even_bounds(buffers[0].numel(), algorithm.num_ranks)
    own = own_slice(algorithm, bounds)
    algorithm.reduce_scatter(buffers, bounds)
    on_summed(buffers[0][own], own.start)
    algorithm.all_gather(buffers[0], bounds)
    return buffers[0]


class HalvingStep(NamedTuple):
    """One exchange of recursive halving: chunks [kept] stay here, chunks [given] go to the peer."""

    kept: range
    given: range
    peer: int


class RecursiveHalvingDoubling:
    """For 2^k ranks with equally many lanes: as many bytes as a ring, in 2k messages instead of 2 (2^k - 1).

    Step i exchanges with the rank at distance 2^i, whose subtree is the sibling of this rank's, so the additions are
    the tree's own. Each step keeps half of the chunks; the all-gather takes the same steps in reverse.
    """

    def __init__(self, comm: CommThread, rank: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self.own_chunk = chunk_of_rank(rank, num_ranks)
        self._comm = comm
        self._rank = rank
        self._steps = _halving_steps(rank, num_ranks)

    def all_reduce(self, buffers: Sequence[Tensor], on_summed: OnSummed) -> Tensor:
        return _reduce_scatter_then_gather(self, buffers, on_summed)

    def reduce_scatter(self, buffers: Sequence[Tensor], bounds: Bounds) -> None:
        (flat,) = buffers
        longest = max((_length(step.kept, bounds) for step in self._steps), default=0)
        received = self._comm.scratch(flat, longest)
        for kept, given, peer in self._steps:
            incoming = received[: _length(kept, bounds)]
            self._comm.exchange([Message(peer, flat[_slice(given, bounds)])], [Message(peer, incoming)])
            flat[_slice(kept, bounds)].add_(incoming)

    def all_gather(self, flat: Tensor, bounds: Bounds) -> None:
        for kept, given, peer in reversed(self._steps):
            outgoing, incoming = flat[_slice(kept, bounds)], flat[_slice(given, bounds)]
            self._comm.exchange([Message(peer, outgoing)], [Message(peer, incoming)])


class TwoRankExchange(RecursiveHalvingDoubling):
    """For two ranks with equally many lanes: each sends its whole buffer, and both add.

    The bytes are those of recursive halving, in one message instead of two in sequence: with small buffers, latency is
    nearly all of the time.
    """

    def all_reduce(self, buffers: Sequence[Tensor], on_summed: OnSummed) -> Tensor:
        (flat,) = buffers
        incoming, peer = self._comm.scratch(flat, flat.numel()), 1 - self._rank
        self._comm.exchange([Message(peer, flat)], [Message(peer, incoming)])
        # In the tree's order on both: the sum of two NaNs has the bits of the first.
        left, right = (flat, incoming) if self._rank < peer else (incoming, flat)
        torch.add(left, right, out=flat)
        on_summed(flat, 0)
        return flat


class DirectExchange:
    """For any number of ranks and any blocks of lanes: every rank sends each chunk to the rank that adds it up.

    That rank adds the chunks of all ranks' subtrees along the tree, and sends the sum to all ranks. As many bytes as a
    ring if every rank's lanes are one subtree; every further subtree is sent as well.
    """

    def __init__(self, comm: CommThread, rank: int, lanes: Lanes) -> None:
        self._nodes = [covering_nodes(share) for share in lanes.shares]  # by rank
        self.num_ranks = len(self._nodes)
        self.own_chunk = chunk_of_rank(rank, self.num_ranks)
        self._comm = comm
        self._rank = rank
        self._others = [other for other in range(self.num_ranks) if other != rank]

    def all_reduce(self, buffers: Sequence[Tensor], on_summed: OnSummed) -> Tensor:
        return _reduce_scatter_then_gather(self, buffers, on_summed)

    def reduce_scatter(self, buffers: Sequence[Tensor], bounds: Bounds) -> None:
        slices = self._slices(bounds)
        own = slices[self._rank]
        num_received = sum(len(self._nodes[rank]) for rank in self._others)
        own_length = own.stop - own.start
        scratch = iter(self._comm.scratch(buffers[0], num_received * own_length).view(num_received, own_length))
        chunks = {rank: [next(scratch) for _ in self._nodes[rank]] for rank in self._others}
        self._comm.exchange(
            [Message(rank, buffer[slices[rank]]) for rank in self._others for buffer in buffers],
            [Message(rank, chunk) for rank in self._others for chunk in chunks[rank]],
        )
        chunks[self._rank] = [buffer[own] for buffer in buffers]
        sums: TreeSum[Tensor] = TreeSum(Tensor.add_)
        for rank, nodes in enumerate(self._nodes):
            for node, chunk in zip(nodes, chunks[rank], strict=True):
                sums.push(node, chunk)
        total, result = sums.total(), buffers[0][own]
        if total.data_ptr() != result.data_ptr():
            result.copy_(total)

    def all_gather(self, flat: Tensor, bounds: Bounds) -> None:
        slices = self._slices(bounds)
        own = flat[slices[self._rank]]
        self._comm.exchange(
            [Message(rank, own) for rank in self._others], [Message(rank, flat[slices[rank]]) for rank in self._others]
        )

    def _slices(self, bounds: Bounds) -> list[slice]:
        """Return the slice of a buffer that each rank adds up."""
        chunks = [chunk_of_rank(rank, self.num_ranks) for rank in range(self.num_ranks)]
        return [slice(bounds[chunk], bounds[chunk + 1]) for chunk in chunks]


def choose_all_reduce(comm: CommThread, rank: int, lanes: Lanes) -> TreeAllReduce:
    """Return the algorithm with the fewest messages that these lanes allow."""
    num_ranks = len(lanes.shares)
    is_power_of_two = num_ranks & (num_ranks - 1) == 0
    if is_power_of_two and len({len(share) for share in lanes.shares}) == 1:
        return (TwoRankExchange if num_ranks == 2 else RecursiveHalvingDoubling)(comm, rank, num_ranks)
    return DirectExchange(comm, rank, lanes)


def _halving_steps(rank: int, num_ranks: int) -> list[HalvingStep]:
    steps: list[HalvingStep] = []
    chunks = range(num_ranks)
    distance = 1
    while distance < num_ranks:
        peer = rank ^ distance
        lower, upper = chunks[: len(chunks) // 2], chunks[len(chunks) // 2 :]
        steps.append(HalvingStep(lower, upper, peer) if rank < peer else HalvingStep(upper, lower, peer))
        chunks = steps[-1].kept
        distance *= 2
    return steps


def _slice(chunks: range, bounds: Bounds) -> slice:
    return slice(bounds[chunks.start], bounds[chunks.stop])


def _length(chunks: range, bounds: Bounds) -> int:
    return bounds[chunks.stop] - bounds[chunks.start]
