"""TorchMetric: how a torchmetrics metric is updated, reduced and left afterwards."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.regression import MeanSquaredError
from torchmetrics.wrappers import MultitaskWrapper, Running

from lockstep.errors import UserError
from lockstep.metrics import TorchMetric
from lockstep.metrics.aggregator import MetricAggregator

CPU = torch.device("cpu")
SCORES = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3


def result_of(*updates: TorchMetric) -> Any:
    aggregator = MetricAggregator(CPU)
    for chunk, update in enumerate(updates):
        aggregator.add(chunk, {"x": update})
    return aggregator.results()


def test_torchmetrics_is_imported_on_first_use() -> None:
    code = "import lockstep.metrics, lockstep.train.run, sys; assert 'torchmetrics' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_without_torchmetrics_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = MeanMetric()
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(UserError, match=r"needs torchmetrics: pip install 'lockstep-train\[metrics\]'"):
        TorchMetric(metric, 1.0)


def test_a_metric_is_reset_afterwards() -> None:
    metric = MeanMetric()
    function = metric.distributed_available_fn
    metric.update(100.0)  # an update that the user made before
    assert result_of(TorchMetric(metric, torch.tensor([1.0, 2.0])), TorchMetric(metric, torch.tensor([6.0]))) == {
        "x": 3.0
    }
    assert not metric.update_called
    assert metric.mean_value.item() == 0
    assert metric.distributed_available_fn is function
    metric.update(4.0)
    assert metric.compute() == 4.0


def test_a_metric_is_reset_even_if_it_fails() -> None:
    metric = MulticlassF1Score(3)
    metric.update(SCORES, LABELS)
    with pytest.raises((RuntimeError, ValueError)):
        TorchMetric(metric, SCORES, LABELS[:3]).value(CPU)
    assert not metric.update_called


def test_one_object_may_be_used_under_two_names() -> None:
    metric = MeanMetric()
    aggregator = MetricAggregator(CPU)
    for chunk in range(3):
        aggregator.add(chunk, {"low": TorchMetric(metric, float(chunk)), "high": TorchMetric(metric, 10.0 + chunk)})
    assert aggregator.results() == {"low": 1.0, "high": 11.0}


def test_keyword_arguments_reach_update() -> None:
    metric = MeanMetric()
    values = torch.tensor([1.0, 5.0])
    assert result_of(TorchMetric(metric, value=values, weight=torch.tensor([3.0, 1.0]))) == {"x": 2.0}
    with pytest.raises(TypeError, match="wieght"):  # a typo is not ignored
        TorchMetric(metric, values, wieght=1.0).value(CPU)
    collection = MetricCollection([MeanMetric(), SumMetric()])  # SumMetric takes no weight
    update = TorchMetric(collection, values, weight=torch.tensor([3.0, 1.0]))
    assert result_of(update) == {"x/MeanMetric": 2.0, "x/SumMetric": 6.0}


def test_a_collection_that_was_used_before() -> None:
    """It already shares states between its members, which here are updated one by one."""
    collection = MetricCollection({"sum": SumMetric(), "same": SumMetric(), "all": CatMetric(), "again": CatMetric()})
    collection.update(torch.tensor([5.0, 6.0]))
    assert collection.compute()["same"] == 11
    results = result_of(TorchMetric(collection, torch.tensor([1.0, 2.0])), TorchMetric(collection, torch.tensor([4.0])))
    assert results == {"x/sum": 7.0, "x/same": 7.0, "x/all": [1.0, 2.0, 4.0], "x/again": [1.0, 2.0, 4.0]}
    collection.update(torch.tensor([3.0, 4.0]))
    own = {name: value.tolist() for name, value in collection.compute().items()}
    assert own == {"sum": 7.0, "same": 7.0, "all": [3.0, 4.0], "again": [3.0, 4.0]}


class Gathered(Metric):
    """A state without a reduction: in one process a pair, in several a pair of each."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("pair", torch.zeros(2), dist_reduce_fx=None)

    def update(self, number: float) -> None:
        self.pair = self.pair + number

    def compute(self) -> Tensor:
        return self.pair


def test_a_state_without_a_reduction_is_stacked_unless_there_is_one_chunk() -> None:
    assert result_of(TorchMetric(Gathered(), 3.0)) == {"x": [3.0, 3.0]}
    assert result_of(TorchMetric(Gathered(), 3.0), TorchMetric(Gathered(), 4.0)) == {"x": [[3.0, 3.0], [4.0, 4.0]]}


class ListSum(Metric):
    """A list that is reduced to a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx=lambda values: torch.stack(values).sum(0))

    def update(self, value: Tensor) -> None:
        self.values.append(value)

    def compute(self) -> Tensor:
        assert isinstance(self.values, Tensor)
        return self.values


def test_a_list_may_be_reduced_to_a_tensor() -> None:
    metric = ListSum()
    for _ in range(2):  # the second time it must be a list again
        assert result_of(*(TorchMetric(metric, torch.tensor([1.0, value])) for value in (2.0, 3.0))) == {
            "x": [2.0, 5.0]
        }


class Words(Metric):
    def __init__(self) -> None:
        super().__init__()
        self.add_state("words", [], dist_reduce_fx=None)

    def update(self, words: Any) -> None:
        self.words.append(words)

    def compute(self) -> Tensor:
        return torch.tensor(0.0)


class Stateless(Metric):
    total = 0.0

    def update(self, value: float) -> None:
        self.total += value

    def compute(self) -> Tensor:
        return torch.tensor(self.total)


def test_metrics_that_cannot_be_gathered_are_refused() -> None:
    with pytest.raises(UserError, match=r"metric 'x': the state 'words' of Words holds a str: only tensors"):
        result_of(TorchMetric(Words(), "hello"))
    with pytest.raises(UserError, match=r"TorchMetric\(Stateless, …\): Stateless has no states to gather"):
        TorchMetric(Stateless(), 1.0)
    with pytest.raises(UserError, match=r"Running covers the last few updates"):
        TorchMetric(Running(SumMetric(), window=2), 1.0)
    with pytest.raises(UserError, match=r"contains a MetricCollection"):
        TorchMetric(MultitaskWrapper({"a": MetricCollection([MeanSquaredError()]), "b": MeanSquaredError()}), {}, {})
    with pytest.raises(
        UserError, match=r"TorchMetric\(Tensor, …\): expected a torchmetrics Metric or MetricCollection"
    ):
        TorchMetric(SCORES, LABELS)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a MulticlassAccuracy is not a metric value.*TorchMetric\(metric, …\)"):
        MetricAggregator(CPU).add(0, {"x": MulticlassAccuracy(3)})  # type: ignore[dict-item]
