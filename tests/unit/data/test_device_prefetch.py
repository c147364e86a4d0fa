"""Moving batches to the device, whatever a batch consists of; on the CPU they are not copied."""

from collections import OrderedDict, defaultdict
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import TensorDataset

from lockstep.data.device_prefetch import _pipelined, prefetch_to_device, to_device
from lockstep.data.evaluation_loader import EvaluationLoader
from lockstep.data.iterable_loader import IterableLaneLoader
from lockstep.data.lane_loader import LaneLoader
from lockstep.world.world import World

META = torch.device("meta")  # a device that every machine has

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Sample:
    pixels: Tensor
    name: str


class MovesItself:
    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> "MovesItself":
        return MovesItself(str(device))


def test_tensors_are_moved_in_every_kind_of_container() -> None:
    t = torch.zeros(2)
    batch = [t, (t, "text", 3, None), Pair(t, {"a": t}), OrderedDict(b=t), Sample(t, "x"), MovesItself(), b"raw"]
    there = to_device(batch, META)
    assert [type(element) for element in there] == [type(element) for element in batch]
    tensors = [there[0], there[1][0], there[2].left, there[2].right["a"], there[3]["b"], there[4].pixels]
    assert all(tensor.device == META for tensor in tensors)
    assert there[1][1:] == ("text", 3, None)
    assert there[4].name == "x"
    assert there[5].device == "meta"
    assert t.device.type == "cpu", "the original batch is not changed"


def test_unusual_mappings_become_dictionaries() -> None:
    there = to_device(defaultdict(list, a=torch.zeros(1)), META)
    assert dict(there).keys() == {"a"}
    assert there["a"].device == META


def test_a_packed_sequence_is_moved_by_its_own_to() -> None:
    (there,) = to_device([pack_sequence([torch.ones(3), torch.ones(2)])], META)
    assert isinstance(there, PackedSequence)
    assert there.data.device == META
    assert there.batch_sizes.device.type == "cpu"


def numbered(closed: list[bool]) -> Generator[tuple[int, Tensor], None, None]:
    try:
        for number in range(3):
            yield number, torch.zeros(1)
    finally:
        closed.append(True)


def test_on_the_cpu_batches_are_unchanged() -> None:
    batches = numbered([])
    assert prefetch_to_device(batches, torch.device("cpu")) is batches


def test_closing_closes_the_generator_behind_it() -> None:
    closed: list[bool] = []
    batches: Any = prefetch_to_device(numbered(closed), META)
    assert next(batches)[1].device == META
    batches.close()
    assert closed == [True]


@pytest.mark.parametrize(("ahead", "sent_before_yield"), [(True, [2, 3, 3]), (False, [1, 2, 3])])
def test_the_next_batch_is_sent_before_one_is_yielded(ahead: bool, sent_before_yield: list[int]) -> None:
    sent: list[int] = []

    def send(number: int) -> Any:
        sent.append(number)
        return number

    received = [(number, len(sent)) for number in _pipelined(map(send, range(3)), ahead, lambda number: number)]
    assert received == list(enumerate(sent_before_yield))


def test_loaders_move_to_the_worlds_device() -> None:
    world = World(device=META)
    dataset = TensorDataset(torch.arange(8))
    assert next(LaneLoader(dataset, 4, world, tail="pad").batches()).lanes[0].data[0].device == META
    assert next(LaneLoader(dataset, 4, world, tail="pad").batches()).lanes[0].weight.device == META  # type: ignore[union-attr]
    assert next(iter(EvaluationLoader(dataset, 4, world))).data[0].device == META

    class Numbers(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(8))

    assert next(IterableLaneLoader(Numbers(), 4, world).batches()).lanes[0].data.device == META


@needs_cuda
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tail", ["short", "pad"])
def test_on_cuda_the_same_batches_arrive(workers: int, tail: Any) -> None:
    def batches(world: World) -> list[Any]:
        # Large, so that a copy takes its time; many batches, so that memory is used again while it is still read.
        dataset = TensorDataset(torch.arange(90 * 4096).float().view(90, 4096), torch.arange(90))
        loader = LaneLoader(dataset, 16, world, lanes=4, tail=tail, workers=workers)
        results = []
        for batch in loader.batches(0, 40):
            for lane in batch.lanes:
                if lane.data is not None:
                    inputs, labels = lane.data
                    assert inputs.device == world.device
                    busy = inputs
                    for _ in range(20):
                        busy = busy * 1.0
                    results.append((busy, labels, lane.weight))
        return [tuple(None if t is None else t.cpu().tolist() for t in result) for result in results]

    assert batches(World(device=torch.device("cuda", 0))) == batches(World())


@needs_cuda
def test_on_cuda_other_objects_arrive_too() -> None:
    class Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def to(self, device: torch.device) -> "Holder":
            return Holder(self.tensor.to(device))

    def hold(samples: list[Any]) -> Holder:
        return Holder(torch.stack(samples))

    dataset = [torch.full((4096,), float(index)) for index in range(64)]
    loader = LaneLoader(dataset, 8, World(device=torch.device("cuda", 0)), lanes=1, collate=hold, shuffle=False)
    sums = [batch.lanes[0].data.tensor.double().sum() for batch in loader.batches(0, 64)]
    assert [s.item() for s in sums] == [4096.0 * sum(range(8 * (n % 8), 8 * (n % 8) + 8)) for n in range(64)]
