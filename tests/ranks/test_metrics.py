"""Metrics on real ranks: the same bits on any number of ranks, and equal to those of the whole data set at once.

The "model" passes on columns of the data set, so that the metrics are compared and not a model's kernels.
"""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics import classification as tm
from torchmetrics import regression as tr
from torchmetrics.image import PeakSignalNoiseRatio
from torchmetrics.retrieval import RetrievalMRR
from torchmetrics.wrappers import ClasswiseWrapper, MultioutputWrapper

from lockstep import metrics as lm
from lockstep.errors import LockstepError
from lockstep.metrics.aggregator import MetricAggregator
from lockstep.testing import ranks
from lockstep.train.run import Run
from lockstep.world.world import World

NUM_SAMPLES, BATCH, NUM_CLASSES = 101, 8, 5  # 13 chunks; the last has five samples
LATE_CLASS = 3  # neither occurs nor is predicted in the first chunk
RANKS = (2, 3)
LARGE_BATCH = 60  # two chunks: with three ranks, one has none


def columns() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    target = normal(NUM_SAMPLES)
    classes = torch.randint(0, NUM_CLASSES - 1, (NUM_SAMPLES,), generator=generator)  # the last class never occurs
    logits = normal(NUM_SAMPLES, NUM_CLASSES) + 2 * torch.nn.functional.one_hot(classes, NUM_CLASSES)
    logits[:, -1] = -10.0  # and is never predicted
    classes[:BATCH] %= LATE_CLASS
    logits[:BATCH, LATE_CLASS] = -10.0
    cancels = torch.full((NUM_SAMPLES,), 0.1, dtype=torch.float64)
    cancels[:BATCH] = 0.0
    cancels[-BATCH:] = 0.0
    cancels[0], cancels[-1] = 1e16, -1e16  # next to one of these, the values between them are lost
    return {
        "predicted": target + 0.3 * normal(NUM_SAMPLES),
        "target": target,
        "outputs": normal(NUM_SAMPLES, 2),
        "targets": normal(NUM_SAMPLES, 2),
        "far": target.double() + 1e8,  # a large offset
        "far_predicted": target.double() + 1e8 + 0.3 * normal(NUM_SAMPLES),
        "wild": normal(NUM_SAMPLES).double() * 10 ** (3 * normal(NUM_SAMPLES)),  # of all magnitudes
        "cancels": cancels,
        "classes": classes,
        "logits": logits,
        "scores": (normal(NUM_SAMPLES) * 4).round() / 4,  # many ties
        "labels": torch.randint(0, 2, (NUM_SAMPLES,), generator=generator),
        "query": torch.arange(NUM_SAMPLES) // 7,  # queries that span several chunks
    }


WHOLE = columns()
Batch = dict[str, Tensor]


class BatchMean(Metric):
    """A state that is a mean over updates."""

    full_state_update = False
    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("average", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, values: Tensor) -> None:
        self.average = values.mean()

    def compute(self) -> Tensor:
        return self.average


class LargestNorm(Metric):
    """Has a state with a custom reduction, one that grows, and one of an integer type."""

    full_state_update = False
    norm: Tensor
    seen: Tensor
    smallest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("norm", torch.zeros(()), dist_reduce_fx=lambda stacked: stacked.square().sum(0).sqrt())
        self.add_state("seen", torch.zeros(0), dist_reduce_fx="cat")
        self.add_state("smallest", torch.tensor(2**40), dist_reduce_fx="min")

    def update(self, values: Tensor) -> None:
        self.norm = values.square().sum().sqrt()
        self.seen = torch.cat([self.seen, values])
        self.smallest = torch.minimum(self.smallest, (1000 * values).long().min())

    def compute(self) -> dict[str, Tensor]:
        return {"norm": self.norm, "seen": self.seen, "smallest": self.smallest}


class Kind:
    """A metric: what a batch contributes, and the expected result of the whole data set."""

    def __init__(self, contribute: Callable[[Batch], Any], whole: Callable[[Batch], Any], rtol: float = 1e-12) -> None:
        self.contribute = contribute
        self.whole = whole
        self.rtol = rtol


def sk(name: str) -> Callable[..., Any]:
    """Return a function of scikit-learn, imported on use because the ranks do not need it."""
    from sklearn import metrics

    function: Callable[..., Any] = getattr(metrics, name)
    return function


def from_torchmetrics(metric: Metric | MetricCollection, *names: str, rtol: float = 1e-6) -> Kind:
    """A torchmetrics metric; most of them compute in fp32, hence the tolerance."""

    def whole(data: Batch) -> Any:
        alone = metric.clone()
        alone.update(*(data[name] for name in names))
        result = alone.compute()
        return result if isinstance(result, dict) else result.tolist()

    return Kind(lambda batch: lm.TorchMetric(metric, *(batch[name] for name in names)), whole, rtol)


def by_class(kind: Any, sk_name: str) -> dict[str, Kind]:
    """Return the macro average, as scikit-learn computes it by default, and the scores of all classes."""
    predicted: Callable[[Batch], Tensor] = lambda batch: batch["logits"].argmax(1)  # noqa: E731
    return {
        kind.__name__: Kind(
            lambda batch: kind(predicted(batch), batch["classes"], NUM_CLASSES),
            lambda data: sk(sk_name)(data["classes"], predicted(data), average="macro"),
        ),
        f"{kind.__name__} per class": Kind(
            lambda batch: kind(predicted(batch), batch["classes"], NUM_CLASSES, per_class=True),
            lambda data: [*sk(sk_name)(data["classes"], predicted(data), average=None), float("nan")],
        ),
    }


OWN = {
    "mean": Kind(lambda b: (b["wild"].double().sum(), len(b["wild"])), lambda d: d["wild"].double().mean().item()),
    "mean of what cancels": Kind(
        lambda b: (b["cancels"].sum(), len(b["cancels"])), lambda d: math.fsum(d["cancels"].tolist()) / NUM_SAMPLES
    ),
    "mean of numbers": Kind(lambda b: (float(b["target"].sum()), 8), lambda d: float(d["target"].sum()) / 104, 1e-6),
    "total": Kind(lambda b: lm.Total((b["wild"] > 0).sum()), lambda d: float((d["wild"] > 0).sum())),
    "mse": Kind(
        lambda b: lm.MeanSquaredError(b["predicted"], b["target"]),
        lambda d: sk("mean_squared_error")(d["target"].double(), d["predicted"].double()),
    ),
    "rmse": Kind(
        lambda b: lm.RootMeanSquaredError(b["predicted"], b["target"]),
        lambda d: sk("root_mean_squared_error")(d["target"].double(), d["predicted"].double()),
    ),
    "r2": Kind(
        lambda b: lm.R2Score(b["predicted"], b["target"]),
        lambda d: sk("r2_score")(d["target"].double(), d["predicted"].double()),
    ),
    "r2 far from zero": Kind(
        lambda b: lm.R2Score(b["far_predicted"], b["far"]), lambda d: sk("r2_score")(d["far"], d["far_predicted"])
    ),
    "r2 of two outputs": Kind(
        lambda b: lm.R2Score(b["outputs"], b["targets"]),
        lambda d: sk("r2_score")(d["targets"].double(), d["outputs"].double()),
    ),
    "confusion": Kind(
        lambda b: lm.ConfusionMatrix(b["logits"].argmax(1), b["classes"], NUM_CLASSES),
        lambda d: sk("confusion_matrix")(d["classes"], d["logits"].argmax(1), labels=range(NUM_CLASSES)).tolist(),
    ),
    "accuracy": Kind(
        lambda b: lm.Accuracy(b["logits"].argmax(1), b["classes"], NUM_CLASSES),
        lambda d: sk("accuracy_score")(d["classes"], d["logits"].argmax(1)),
    ),
    **by_class(lm.Precision, "precision_score"),
    **by_class(lm.Recall, "recall_score"),
    **by_class(lm.F1, "f1_score"),
    "auroc": Kind(
        lambda b: lm.AUROC(b["scores"], b["labels"]), lambda d: sk("roc_auc_score")(d["labels"], d["scores"])
    ),
}

TORCHMETRICS = {
    "fed auroc": from_torchmetrics(tm.BinaryAUROC(), "scores", "labels"),
    "fed auroc in bins": from_torchmetrics(tm.BinaryAUROC(thresholds=7), "scores", "labels"),
    "fed calibration": from_torchmetrics(tm.MulticlassCalibrationError(NUM_CLASSES), "logits", "classes"),
    "fed f1": from_torchmetrics(tm.MulticlassF1Score(NUM_CLASSES), "logits", "classes"),
    "fed confusion": from_torchmetrics(tm.MulticlassConfusionMatrix(NUM_CLASSES), "logits", "classes"),
    "fed mse": from_torchmetrics(tr.MeanSquaredError(), "predicted", "wild"),
    "fed r2": from_torchmetrics(tr.R2Score(), "predicted", "target", rtol=1e-5),
    "fed pearson": from_torchmetrics(tr.PearsonCorrCoef(), "predicted", "target", rtol=1e-5),
    "fed cosine": from_torchmetrics(tr.CosineSimilarity(reduction="mean"), "outputs", "targets"),
    "fed mean": from_torchmetrics(MeanMetric(), "wild", rtol=1e-5),
    "fed sum": from_torchmetrics(
        SumMetric().set_dtype(torch.float64), "wild", rtol=1e-12
    ),  # in fp64, where every order shows
    "fed signal to noise": from_torchmetrics(PeakSignalNoiseRatio(data_range=3.0), "predicted", "target"),
    "fed retrieval": from_torchmetrics(RetrievalMRR(), "scores", "labels", "query"),
    "fed wrapper": from_torchmetrics(
        ClasswiseWrapper(tm.MulticlassRecall(NUM_CLASSES, average=None)), "logits", "classes"
    ),
    "fed outputs": from_torchmetrics(MultioutputWrapper(tr.R2Score(), 2), "outputs", "targets", rtol=1e-5),
    "fed difference": from_torchmetrics(tr.MeanSquaredError() - tr.MeanAbsoluteError(), "predicted", "target"),
    "fed collection": from_torchmetrics(
        MetricCollection([tm.MulticlassF1Score(NUM_CLASSES), tm.MulticlassCalibrationError(NUM_CLASSES)], prefix="v_"),
        "logits",
        "classes",
    ),
    # Equal in the first chunk: without care, a collection would merge the two from then on.
    "fed look-alikes": from_torchmetrics(
        MetricCollection(
            {
                "all": tm.MulticlassF1Score(NUM_CLASSES),
                "some": tm.MulticlassF1Score(NUM_CLASSES, ignore_index=LATE_CLASS),
            }
        ),
        "logits",
        "classes",
    ),
}
BATCH_MEAN, LARGEST_NORM = BatchMean(), LargestNorm()
# What these give depends on the chunks, which belong to the evaluation; it does not depend on the ranks.
BY_CHUNK = {
    "fed batch mean": Kind(
        lambda b: lm.TorchMetric(BATCH_MEAN, b["wild"]),
        lambda d: torch.stack([chunk.mean() for chunk in d["wild"].split(BATCH)]).double().mean().item(),
        1e-6,
    ),
    "fed norm": Kind(
        lambda b: lm.TorchMetric(LARGEST_NORM, b["target"]),
        lambda d: {
            "norm": d["target"].square().sum().sqrt(),
            "seen": d["target"],
            "smallest": (1000 * d["target"]).long().min(),
        },
        1e-6,
    ),
}
KINDS = OWN | TORCHMETRICS | BY_CHUNK


def contributions(_model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
    data = dict(zip(WHOLE, batch, strict=True))
    return {name: kind.contribute(data) for name, kind in KINDS.items()}


def evaluate(world: World, batch: int) -> str:
    """Return all metrics as text, which keeps every bit, distinguishes 0.0 from -0.0, and makes nan equal to nan."""
    model = nn.Identity()
    results = Run(None, world).evaluate(model, TensorDataset(*WHOLE.values()), contributions, batch=batch)
    return json.dumps(results)


@functools.cache
def on_ranks(num_ranks: int, batch: int = BATCH) -> list[dict[str, Any]]:
    return [json.loads(text) for text in ranks(num_ranks).run(evaluate, batch)]


def of(name: str, results: dict[str, Any]) -> dict[str, Any]:
    """Return a metric's result or results."""
    return {key: value for key, value in results.items() if key == name or key.startswith(f"{name}/")}


@pytest.mark.parametrize("name", KINDS)
def test_bits_do_not_depend_on_the_ranks(name: str) -> None:
    alone = json.dumps(of(name, on_ranks(1)[0]))
    for num_ranks in RANKS:
        assert [json.dumps(of(name, results)) for results in on_ranks(num_ranks)] == [alone] * num_ranks


@pytest.mark.parametrize("name", KINDS)
def test_ranks_without_a_chunk_know_the_results_too(name: str) -> None:
    alone = json.dumps(of(name, on_ranks(1, LARGE_BATCH)[0]))
    assert [json.dumps(of(name, results)) for results in on_ranks(3, LARGE_BATCH)] == [alone] * 3


@pytest.mark.parametrize("name", KINDS)
def test_metrics_are_those_of_the_whole_set(name: str) -> None:
    kind, results = KINDS[name], of(name, on_ranks(3)[0])
    expected = kind.whole(WHOLE)
    if not isinstance(expected, dict):
        expected = {name: expected}
    else:
        expected = {f"{name}/{key}": value.tolist() for key, value in expected.items()}
    assert results.keys() == expected.keys()
    for key, value in expected.items():
        got, wanted = (torch.tensor(each, dtype=torch.float64) for each in (results[key], value))
        torch.testing.assert_close(got, wanted, rtol=kind.rtol, atol=0, equal_nan=True)


def test_results_are_in_the_users_order() -> None:
    names = [key.split("/")[0] for key in on_ranks(3)[0]]
    assert list(dict.fromkeys(names)) == list(KINDS)


def uneven_counts(world: World) -> dict[str, float]:
    aggregator = MetricAggregator(world.device)
    if world.rank > 0:  # rank 0 sees no sample at all
        aggregator.add(world.rank, {"accuracy": (torch.tensor(float(world.rank)), 4), "loss": (1.0, world.rank)})
    if world.rank == 2:
        aggregator.add(3, {"rare": lm.Total(7)})  # a metric that the other ranks do not have
    return aggregator.results()


def test_means_are_over_samples_and_the_same_on_every_rank() -> None:
    for results in ranks(3).run(uneven_counts):
        assert results == {"accuracy": 3 / 8, "loss": 2 / 3, "rare": 7.0}


def error_of(world: World, metrics: Callable[[nn.Module, list[Tensor]], dict[str, Any]]) -> str:
    try:
        Run(None, world).evaluate(nn.Identity(), TensorDataset(torch.arange(NUM_SAMPLES)), metrics, batch=LARGE_BATCH)
    except (LockstepError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def wrong_class(_model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
    return {"fine": (1.0, 1), "confusion": lm.ConfusionMatrix(batch[0], batch[0], NUM_SAMPLES - 1)}


def other_kind(_model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
    return {"loss": (1.0, 1) if len(batch[0]) == LARGE_BATCH else lm.Total(1.0)}


def other_shape(_model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
    table = batch[0][:40].reshape(-1, 2 if len(batch[0]) == LARGE_BATCH else 4)
    return {"r2": lm.R2Score(table, table)}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        (wrong_class, "UserError: metric 'confusion': 1 samples have a class or a prediction outside 0 … 99"),
        (other_kind, "UserError: metric 'loss': one batch gave a Mean, another a Total"),
        (other_shape, "UserError: metric 'r2': one batch gave numbers of shape (5, 2), another of shape (5, 4)"),
    ],
)
def test_an_error_is_raised_on_every_rank(metrics: Any, message: str) -> None:
    messages = ranks(3).run(error_of, metrics)
    assert len(set(messages)) == 1
    assert messages[0].startswith(message)


class Fails(MeanMetric):
    def compute(self) -> Tensor:
        raise ZeroDivisionError("planted")


FAILS = Fails()


def failing(_model: nn.Module, batch: list[Tensor]) -> dict[str, Any]:
    return {"bad": lm.TorchMetric(FAILS, batch[0]), "good": (1.0, 1)}


def test_a_metric_that_fails_leaves_no_rank_waiting() -> None:
    messages = ranks(3).run(error_of, failing)  # rank 1 has the first chunk
    assert messages[1] == "ZeroDivisionError: planted"
    assert messages[0] == messages[2] == "LockstepError: metric 'bad' failed on rank 1: planted"


def collectives(world: World) -> list[str]:
    """Return the collectives of one evaluation, in order."""
    calls: list[str] = []
    for name in ("all_gather", "gather", "all_reduce", "broadcast"):
        original = getattr(dist, name)

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    try:
        evaluate(world, BATCH)
    finally:
        for name in ("all_gather", "gather", "all_reduce", "broadcast"):
            setattr(dist, name, getattr(dist.distributed_c10d, name))
    return calls


def test_the_number_of_collectives_does_not_depend_on_the_chunks() -> None:
    """Two for each metric, and two each to agree on the metrics and to share the results."""
    for calls in ranks(2).run(collectives):
        assert calls == ["all_gather"] * 2 + ["all_gather", "gather"] * len(KINDS) + ["all_gather"] * 2
