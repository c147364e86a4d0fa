"""Metrics that are exact over ranks: the same bits on any number of them, never means of means.

A metrics function says what a batch adds to each metric; `run.evaluate` puts the batches of all ranks together:

def metrics(model, batch):
    inputs, labels = batch
    scores = model(inputs)
    return {
        "loss": (F.cross_entropy(scores, labels, reduction="sum"), len(labels)),  # a mean: sum and count
        "recall": Recall(scores.argmax(1), labels, num_classes=10),
        "auroc": Feed(auroc, scores, labels),  # auroc = torchmetrics.classification.MulticlassAUROC(10)
    }
"""

from lockstep.metrics.auroc import AUROC
from lockstep.metrics.average import Mean, Total
from lockstep.metrics.classification import F1, Accuracy, ConfusionMatrix, Precision, Recall
from lockstep.metrics.feed import Feed
from lockstep.metrics.regression import MeanSquaredError, R2Score, RootMeanSquaredError

__all__ = [
    "AUROC",
    "F1",
    "Accuracy",
    "ConfusionMatrix",
    "Feed",
    "Mean",
    "MeanSquaredError",
    "Precision",
    "R2Score",
    "Recall",
    "RootMeanSquaredError",
    "Total",
]
