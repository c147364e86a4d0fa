"""Every metric at its edges: empty chunks, NaN and infinity, wrong shapes and classes."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep import metrics
from lockstep.errors import UserError
from lockstep.metrics import (
    AUROC,
    F1,
    Accuracy,
    ConfusionMatrix,
    Mean,
    MeanSquaredError,
    Precision,
    R2Score,
    Recall,
    RootMeanSquaredError,
    Total,
)
from lockstep.metrics.aggregator import Contribution, MetricAggregator

CPU = torch.device("cpu")
NONE, CLASSES = torch.zeros(0), torch.zeros(0, dtype=torch.int64)


def result_of(*contributions: Contribution) -> Any:
    aggregator = MetricAggregator(CPU)
    for chunk, contribution in enumerate(contributions):
        aggregator.add(chunk, {"x": contribution})
    return aggregator.results()["x"]


def test_every_public_name_exists() -> None:
    assert all(getattr(metrics, name).__name__ == name for name in metrics.__all__)


@pytest.mark.parametrize(
    "empty",
    [
        MeanSquaredError(NONE, NONE),
        RootMeanSquaredError(NONE, NONE),
        R2Score(NONE, NONE),
        Accuracy(CLASSES, CLASSES, 3),
        Precision(CLASSES, CLASSES, 3),
        Recall(CLASSES, CLASSES, 3),
        F1(CLASSES, CLASSES, 3),
        AUROC(NONE, NONE),
    ],
    ids=lambda contribution: type(contribution).__name__,
)
def test_no_samples_give_nan(empty: Contribution) -> None:
    assert math.isnan(result_of(empty))


@pytest.mark.parametrize("kind", [MeanSquaredError, RootMeanSquaredError, R2Score])
def test_an_empty_chunk_adds_nothing(kind: Any) -> None:
    predicted, target = torch.tensor([1.0, 2.5, 3.0]), torch.tensor([1.0, 2.0, 4.0])
    assert result_of(kind(NONE, NONE), kind(predicted, target), kind(NONE, NONE)) == result_of(kind(predicted, target))


@pytest.mark.parametrize("kind", [MeanSquaredError, RootMeanSquaredError, R2Score])
def test_nan_and_infinity_are_passed_on(kind: Any) -> None:
    target = torch.tensor([1.0, 2.0, 4.0])
    for bad in (math.nan, math.inf):
        assert not math.isfinite(result_of(kind(target, target), kind(torch.tensor([1.0, bad, 1.0]), target)))
    assert math.isnan(result_of(R2Score(target, target), R2Score(target, torch.tensor([1.0, math.inf, 1.0]))))


def test_r2_of_constant_targets_is_nan() -> None:
    """Even if their mean, computed naively, would have a rounding error."""
    target = torch.full((7,), 0.1, dtype=torch.float64)
    assert math.isnan(result_of(R2Score(target + 1, target), R2Score(target[:3] + 1, target[:3])))


@given(st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=5), min_size=2, max_size=6), st.floats(-1e12, 1e12))
def test_r2_of_targets_far_from_zero(chunks: list[list[float]], offset: float) -> None:
    targets = [torch.tensor(chunk, dtype=torch.float64) + offset for chunk in chunks]
    whole = [Fraction(value) for target in targets for value in target.tolist()]
    mean = sum(whole) / len(whole)
    deviations = sum((value - mean) ** 2 for value in whole)
    errors = Fraction(1, 4) * len(whole)
    score = result_of(*(R2Score(target + 0.5, target) for target in targets))
    if not deviations:
        assert math.isnan(score)
    elif deviations > 1e-4 and abs(offset) < 1e11:  # beyond that, the prediction itself is rounded too much
        assert score == pytest.approx(float(1 - errors / deviations), rel=1e-3 if abs(offset) > 1e8 else 1e-5)


@pytest.mark.parametrize("kind", [Mean, Total, MeanSquaredError, R2Score, ConfusionMatrix, F1, AUROC])
def test_adding_a_batch_does_not_wait_for_the_device(kind: Any) -> None:
    """Reading a number would wait for the device. Meta tensors have no numbers, so reading one raises."""
    meta = torch.device("meta")
    classes, numbers = (torch.zeros(9, dtype=dtype, device=meta) for dtype in (torch.int64, torch.float32))
    arguments: dict[Any, tuple[Any, ...]] = {
        Mean: (numbers.sum(), 9),
        Total: (numbers.sum(),),
        ConfusionMatrix: (classes, classes, 3),
        F1: (classes, classes, 3),
    }
    aggregator = MetricAggregator(meta)
    for chunk in range(3):
        aggregator.add(chunk, {"x": kind(*arguments.get(kind, (numbers, numbers)))})


def test_shapes_that_only_broadcast_are_refused() -> None:
    for kind in (MeanSquaredError, RootMeanSquaredError, R2Score):
        with pytest.raises(UserError, match=r"predictions of shape \(3, 1\), targets of shape \(3,\): give both"):
            kind(torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(UserError, match=r"scores of shape \(3, 2\), labels of shape \(3,\)"):
        AUROC(torch.zeros(3, 2), torch.zeros(3))
    with pytest.raises(UserError, match=r"predicted classes of shape \(3, 4\), true classes of shape \(3,\)"):
        ConfusionMatrix(torch.zeros(3, 4).long(), torch.zeros(3).long(), 4)


def test_classes_must_be_integers_below_num_classes() -> None:
    with pytest.raises(UserError, match="classes must be integers"):
        Accuracy(torch.zeros(3), torch.zeros(3).long(), 2)
    with pytest.raises(UserError, match="num_classes=0: expected 1 to"):
        Accuracy(CLASSES, CLASSES, 0)
    for bad in (-1, 3):
        wrong = Accuracy(torch.tensor([0, bad, 2]), torch.tensor([bad, 0, 2]), 3)
        with pytest.raises(UserError, match=r"metric 'x': 2 samples have a class or a prediction outside 0 … 2"):
            result_of(wrong)


def test_rows_are_the_true_classes() -> None:
    """Class 1 occurs and is never predicted; class 2 is predicted and never occurs; class 3 neither."""
    predicted, target = torch.tensor([0, 2, 0, 0]), torch.tensor([0, 0, 1, 1])
    assert result_of(ConfusionMatrix(predicted, target, 4)) == [[1, 0, 1, 0], [2, 0, 0, 0], [0] * 4, [0] * 4]
    for kind, of_class_0 in ((Precision, 1 / 3), (Recall, 1 / 2), (F1, 2 / 5)):
        *known, unknown = result_of(kind(predicted, target, 4, per_class=True))
        assert known == [of_class_0, 0.0, 0.0]
        assert math.isnan(unknown)
        assert result_of(kind(predicted, target, 4)) == of_class_0 / 3


@given(st.lists(st.tuples(st.sampled_from([-math.inf, -1.0, 0.0, -0.0, 0.5, 2.0]), st.booleans()), max_size=30))
def test_auroc_counts_pairs(samples: list[tuple[float, bool]]) -> None:
    positives = [score for score, label in samples if label]
    negatives = [score for score, label in samples if not label]
    twice_the_wins = sum(2 * (p > n) + (p == n) for p in positives for n in negatives)
    area = result_of(AUROC(torch.tensor([s for s, _ in samples]), torch.tensor([label for _, label in samples])))
    if positives and negatives:
        assert area == twice_the_wins / (2 * len(positives) * len(negatives))
    else:
        assert math.isnan(area)


def test_auroc_needs_labels_of_0_and_1() -> None:
    scores: Tensor = torch.tensor([0.1, math.nan, 0.3])
    assert math.isnan(result_of(AUROC(scores, torch.tensor([0, 1, 1]))))
    with pytest.raises(UserError, match=r"metric 'x': labels other than 0 and 1"):
        result_of(AUROC(scores, torch.tensor([0, 1, 2])))
