"""All-reduce along the tree, with threads as ranks and queues as the network; real ranks are in tests/contracts."""

import threading
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.data.lanes import Lanes, share_lanes
from lockstep.engine.comm_thread import Message
from lockstep.engine.lane_tree import TreeSum, covering_nodes, leaf
from lockstep.engine.tree_all_reduce import DirectExchange, RecursiveHalvingDoubling, TwoRankExchange, choose_all_reduce

TIMEOUT_S = 20.0


Queues = dict[tuple[int, int], SimpleQueue[Tensor]]  # by sender and receiver


class QueueComm:
    """The methods of `CommThread` that an all-reduce uses, over queues."""

    def __init__(self, rank: int, queues: Queues) -> None:
        self.rank = rank
        self.bytes_sent = 0
        self._queues = queues

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message]) -> None:
        for message in sends:
            self.bytes_sent += message.tensor.nbytes
            self._queues[self.rank, message.peer].put(message.tensor.clone())
        for message in receives:
            message.tensor.copy_(self._queues[message.peer, self.rank].get(timeout=TIMEOUT_S))

    def scratch(self, like: Tensor, length: int) -> Tensor:
        return like.new_empty(length)


def sum_on_ranks(lanes: Lanes, leaves: Tensor, divisor: float = 1.0) -> tuple[list[Tensor], list[int]]:
    """Let each rank add up its lanes, then all-reduce; return each rank's result, and the bytes it sent."""
    queues: Queues = defaultdict(SimpleQueue)
    comms: list[Any] = [QueueComm(rank, queues) for rank in range(len(lanes.shares))]
    results: dict[int, Tensor] = {}

    def divide(chunk: Tensor, _start: int) -> None:
        chunk.div_(divisor)

    def run(rank: int) -> None:
        sums: TreeSum[Tensor] = TreeSum(Tensor.add_)
        for lane in lanes.of(rank):
            sums.push(leaf(lane), leaves[lane].clone())
        algorithm = choose_all_reduce(comms[rank], rank, lanes)
        results[rank] = algorithm.all_reduce([partial_sum for _, partial_sum in sums], divide)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(lanes.shares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(len(threads))], [comm.bytes_sent for comm in comms]


def leaves_of(num_lanes: int, length: int) -> Tensor:
    return torch.randn(num_lanes, length, generator=torch.Generator().manual_seed(1)) * 3


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), st.integers(1, 40), st.data())
def test_the_sum_has_the_same_bits_on_any_number_of_ranks(levels: int, length: int, data: st.DataObject) -> None:
    num_lanes = 2**levels
    cuts = data.draw(st.sets(st.integers(1, max(1, num_lanes - 1)), max_size=min(6, num_lanes - 1)))
    bounds = sorted({0, num_lanes, *(cut for cut in cuts if cut < num_lanes)})
    lanes = Lanes(num_lanes, tuple(range(start, stop) for start, stop in pairwise(bounds)))
    leaves = leaves_of(num_lanes, length)
    ((alone,), _) = sum_on_ranks(share_lanes(num_lanes, 1), leaves, 7.0)
    for result in sum_on_ranks(lanes, leaves, 7.0)[0]:
        assert torch.equal(result, alone)


@pytest.mark.parametrize("num_ranks", [2, 4, 8, 16])
def test_a_power_of_two_sends_a_rings_bytes(num_ranks: int) -> None:
    leaves = leaves_of(16, 480)
    _, sent = sum_on_ranks(share_lanes(16, num_ranks), leaves)
    ring = 2 * leaves[0].nbytes * (num_ranks - 1) // num_ranks
    assert sent == [ring] * num_ranks


@pytest.mark.parametrize("num_lanes", [4, 8, 16])
def test_any_other_number_sends_at_most_a_third_more(num_lanes: int) -> None:
    leaves = leaves_of(num_lanes, 5040)
    for num_ranks in range(2, num_lanes + 1):
        lanes = share_lanes(num_lanes, num_ranks)
        _, sent = sum_on_ranks(lanes, leaves)
        ring = 2 * leaves[0].nbytes * (num_ranks - 1)
        assert sum(sent) <= 1.34 * ring
        num_nodes = sum(len(covering_nodes(share)) for share in lanes.shares)
        assert sum(sent) == pytest.approx(ring * (num_nodes / num_ranks + 1) / 2, rel=1e-3)


def test_two_ranks_agree_on_the_bits_of_a_nan() -> None:
    nans = torch.tensor([[0x7FC00001], [0x7FC00002]], dtype=torch.int32).view(torch.float32)
    ours, theirs = (result.view(torch.int32) for result in sum_on_ranks(share_lanes(2, 2), nans)[0])
    assert torch.equal(ours, theirs)


def test_the_algorithm_is_chosen_by_ranks_and_lanes() -> None:
    comm: Any = QueueComm(0, defaultdict(SimpleQueue))
    assert isinstance(choose_all_reduce(comm, 0, share_lanes(8, 2)), TwoRankExchange)
    assert type(choose_all_reduce(comm, 0, share_lanes(8, 4))) is RecursiveHalvingDoubling
    assert isinstance(choose_all_reduce(comm, 0, share_lanes(8, 3)), DirectExchange)
    assert isinstance(choose_all_reduce(comm, 0, share_lanes(8, 2, [1, 7])), DirectExchange)
