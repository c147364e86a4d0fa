"""torchmetrics metrics as tools: what is asked of them, and how they are left."""

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
from lockstep.metrics import Feed
from lockstep.metrics.tally import Tally

CPU = torch.device("cpu")
SCORES = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(12) % 3


def result_of(*feeds: Feed) -> Any:
    tally = Tally(CPU)
    for chunk, feed in enumerate(feeds):
        tally.add(chunk, {"x": feed})
    return tally.results()


def test_torchmetrics_is_loaded_when_it_is_used() -> None:
    code = "import lockstep.metrics, lockstep.train.run, sys; assert 'torchmetrics' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_without_torchmetrics_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    metric = MeanMetric()
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    with pytest.raises(UserError, match=r"needs torchmetrics: pip install 'lockstep-train\[metrics\]'"):
        Feed(metric, 1.0)


def test_a_metric_is_left_as_new() -> None:
    metric = MeanMetric()
    asks = metric.distributed_available_fn
    metric.update(100.0)  # by somebody else, before
    assert result_of(Feed(metric, torch.tensor([1.0, 2.0])), Feed(metric, torch.tensor([6.0]))) == {"x": 3.0}
    assert not metric.update_called
    assert metric.mean_value.item() == 0
    assert metric.distributed_available_fn is asks
    metric.update(4.0)
    assert metric.compute() == 4.0


def test_a_metric_is_reset_also_when_it_fails() -> None:
    metric = MulticlassF1Score(3)
    metric.update(SCORES, LABELS)
    with pytest.raises((RuntimeError, ValueError)):
        Feed(metric, SCORES, LABELS[:3]).value(CPU)
    assert not metric.update_called


def test_one_object_may_serve_under_two_names() -> None:
    metric = MeanMetric()
    tally = Tally(CPU)
    for chunk in range(3):
        tally.add(chunk, {"low": Feed(metric, float(chunk)), "high": Feed(metric, 10.0 + chunk)})
    assert tally.results() == {"low": 1.0, "high": 11.0}


def test_keywords_and_weights_are_handed_on() -> None:
    metric = MeanMetric()
    values = torch.tensor([1.0, 5.0])
    assert result_of(Feed(metric, value=values, weight=torch.tensor([3.0, 1.0]))) == {"x": 2.0}
    with pytest.raises(TypeError, match="wieght"):  # a slip is not passed over
        Feed(metric, values, wieght=1.0).value(CPU)
    collection = MetricCollection([MeanMetric(), SumMetric()])  # of which one knows no weight
    feed = Feed(collection, values, weight=torch.tensor([3.0, 1.0]))
    assert result_of(feed) == {"x/MeanMetric": 2.0, "x/SumMetric": 6.0}


def test_a_collection_that_was_used_before() -> None:
    """It has learned to share states between its members, which here are fed one by one."""
    collection = MetricCollection({"sum": SumMetric(), "same": SumMetric(), "all": CatMetric(), "again": CatMetric()})
    collection.update(torch.tensor([5.0, 6.0]))
    assert collection.compute()["same"] == 11
    results = result_of(Feed(collection, torch.tensor([1.0, 2.0])), Feed(collection, torch.tensor([4.0])))
    assert results == {"x/sum": 7.0, "x/same": 7.0, "x/all": [1.0, 2.0, 4.0], "x/again": [1.0, 2.0, 4.0]}
    collection.update(torch.tensor([3.0, 4.0]))
    own = {name: value.tolist() for name, value in collection.compute().items()}
    assert own == {"sum": 7.0, "same": 7.0, "all": [3.0, 4.0], "again": [3.0, 4.0]}


class Gathered(Metric):
    """A state without a reduction: a pair here, one of each process elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("pair", torch.zeros(2), dist_reduce_fx=None)

    def update(self, number: float) -> None:
        self.pair = self.pair + number

    def compute(self) -> Tensor:
        return self.pair


def test_a_state_without_a_reduction_is_stacked_unless_there_is_one_chunk() -> None:
    assert result_of(Feed(Gathered(), 3.0)) == {"x": [3.0, 3.0]}
    assert result_of(Feed(Gathered(), 3.0), Feed(Gathered(), 4.0)) == {"x": [[3.0, 3.0], [4.0, 4.0]]}


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
    for _ in range(2):  # and is a list again afterwards
        assert result_of(*(Feed(metric, torch.tensor([1.0, value])) for value in (2.0, 3.0))) == {"x": [2.0, 5.0]}


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


def test_what_cannot_be_gathered_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"metric 'x': the state 'words' of Words holds a str: only tensors"):
        result_of(Feed(Words(), "hello"))
    with pytest.raises(UserError, match=r"Feed\(Stateless, …\): Stateless has no states to gather"):
        Feed(Stateless(), 1.0)
    with pytest.raises(UserError, match=r"Running is a metric of the last few updates"):
        Feed(Running(SumMetric(), window=2), 1.0)
    with pytest.raises(UserError, match=r"has a MetricCollection inside"):
        Feed(MultitaskWrapper({"a": MetricCollection([MeanSquaredError()]), "b": MeanSquaredError()}), {}, {})
    with pytest.raises(UserError, match=r"Feed\(Tensor, …\): expected a torchmetrics Metric or MetricCollection"):
        Feed(SCORES, LABELS)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"a MulticlassAccuracy is no contribution to a metric.*Feed\(metric, …\)"):
        Tally(CPU).add(0, {"x": MulticlassAccuracy(3)})  # type: ignore[dict-item]
