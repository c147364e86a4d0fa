"""Fetching samples: keyed random numbers, fast paths that change nothing, and errors that name the sample."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from lockstep.data.lane_loader import LaneLoader
from lockstep.data.sample_order import SampleOrder
from lockstep.world.world import World
from tests.unit.data.datasets import Augmented, Failing, Many, draw, seed_all


def fetch(dataset: Any, number: int = 0, **options: Any) -> list[Any]:
    """Return the lanes' data of one batch."""
    loader = LaneLoader(dataset, 8, World(), **({"lanes": 2, "seed": 1} | options))
    return [lane.data for lane in next(loader.batches(number)).lanes]


def by_sample(dataset: Any, number: int = 0, **options: Any) -> dict[int, tuple[float, ...]]:
    drawn = {}
    for lane in fetch(dataset, number, **options):
        for row, index in enumerate(lane["index"].tolist()):
            drawn[index] = (*lane["noise"][row].tolist(), *(float(part[row]) for part in lane["other"]))
    return drawn


def test_the_random_numbers_of_a_sample_depend_on_the_sample_only() -> None:
    dataset = Augmented(8)  # one batch per epoch, so that every split sees the same samples
    drawn = by_sample(dataset)
    assert len(set(drawn.values())) == 8
    assert len({value for values in drawn.values() for value in values}) == 32, "the generators give different numbers"
    assert by_sample(dataset, lanes=8) == drawn, "not on the lane"
    assert by_sample(Subset(dataset, range(8))) == drawn, "not on a Subset around it"
    assert by_sample(dataset, shuffle=False) == drawn, "not on the position"
    assert by_sample(dataset, 1).keys() == drawn.keys()
    assert not set(by_sample(dataset, 1).values()) & set(drawn.values()), "but on the epoch"
    assert not set(by_sample(dataset, seed=2).values()) & set(drawn.values()), "and on the seed"


@pytest.mark.parametrize("dataset", [Augmented(), TensorDataset(torch.arange(24))])
def test_the_callers_random_numbers_are_not_disturbed(dataset: Any) -> None:
    seed_all()
    undisturbed = [draw() for _ in range(3)]
    seed_all()
    batches = LaneLoader(dataset, 8, World()).batches(0, 3)
    assert [draw() for _ in batches] == undisturbed


def test_the_callers_random_numbers_are_not_disturbed_by_a_failing_data_set() -> None:
    seed_all()
    undisturbed = draw()
    seed_all()
    with pytest.raises(KeyError):
        next(LaneLoader(Failing(KeyError), 8, World()).batches())
    assert draw() == undisturbed


class Counting(TensorDataset):
    """A TensorDataset with its own `__getitem__`."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(-tensor for tensor in super().__getitem__(index))


INPUTS, LABELS = torch.randn(24, 3), torch.arange(24)


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(INPUTS, LABELS),
        Subset(TensorDataset(INPUTS, LABELS), list(range(23, -1, -1))),
        Subset(TensorDataset(INPUTS, LABELS), [-1, *range(20)]),
        Subset(Subset(TensorDataset(INPUTS, LABELS), [5, *range(6, 24)]), [-1, 0, *range(1, 18)]),
        Counting(INPUTS, LABELS),
        Subset(Counting(INPUTS, LABELS), range(4, 20)),
    ],
    ids=["tensors", "subset", "from the end", "nested", "subclass", "subset of subclass"],
)
@pytest.mark.parametrize("lanes", [1, 2])
def test_fast_paths_equal_collating_the_samples(dataset: Any, lanes: int) -> None:
    lane_batch = 8 // lanes
    for number in range(2):
        order = SampleOrder(len(dataset), 1, number // (len(dataset) // 8))
        start = number % (len(dataset) // 8) * 8
        for lane, data in enumerate(fetch(dataset, number, lanes=lanes)):
            indices = order.indices(start + lane * lane_batch, start + (lane + 1) * lane_batch)
            expected = default_collate([dataset[index] for index in indices])
            assert type(data) is type(expected)
            assert all(map(torch.equal, data, expected))


def test_tensors_are_fetched_without_a_call_per_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("called for a single sample")

    monkeypatch.setattr(TensorDataset.__getitem__, "__code__", refuse.__code__)
    assert len(fetch(Subset(TensorDataset(INPUTS, LABELS), range(16)))) == 2


@pytest.mark.parametrize("wrap", [lambda dataset: dataset, lambda dataset: Subset(dataset, range(24))])
def test_getitems_is_called_once_per_lane(wrap: Callable[[Any], Any]) -> None:
    dataset = Many()
    drawn = by_sample(wrap(dataset))
    assert [len(call) for call in dataset.calls] == [4, 4]
    assert sorted(index for call in dataset.calls for index in call) == sorted(drawn)
    assert by_sample(wrap(Many())) == drawn, "keyed by epoch and lane"
    assert len(set(drawn.values())) == 8


def test_mappings_and_numbers_are_collated() -> None:
    lane = fetch(Augmented())[0]
    assert lane["index"].dtype == torch.int64
    assert lane["noise"].shape == (4, 2)


def collate_into_text(samples: list[Any]) -> str:
    return ",".join(str(sample) for sample in samples)


def test_a_custom_collate_function() -> None:
    assert fetch(list("abcdefgh"), collate=collate_into_text, shuffle=False) == ["a,b,c,d", "e,f,g,h"]
    assert fetch(TensorDataset(LABELS[:8]), collate=len) == [4, 4]


@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError])
@pytest.mark.parametrize("world", [World(), World(rank=1, size=2)])
def test_an_error_names_the_sample(kind: type[Exception], world: World) -> None:
    loader = LaneLoader(Failing(kind), 8, world, lanes=2, shuffle=False)
    with pytest.raises(kind, match="a planted failure") as caught:
        next(loader.batches(3))
    assert caught.value.__notes__ == ["lockstep: while reading sample 5 of the data set (epoch 3, lane 1)"]


def test_an_error_in_collating_names_the_samples() -> None:
    ragged = [torch.zeros(index) for index in range(8)]
    with pytest.raises(RuntimeError) as caught:
        fetch(ragged, shuffle=False)
    assert caught.value.__notes__ == ["lockstep: while collating the samples 0, 1, 2, 3 (epoch 0, lane 0)"]
