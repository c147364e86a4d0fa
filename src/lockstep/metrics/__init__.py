"""Metrics over all ranks, with the same bits on any number of them and never a mean of means.

A metrics function returns what a batch contributes to each metric; `run.evaluate` combines the batches of all ranks:

    def metrics(model, batch):
        inputs, labels = batch
        scores = model(inputs)
        return {
            "loss": (F.cross_entropy(scores, labels, reduction="sum"), len(labels)),  # a mean, as sum and count
            "recall": Recall(scores.argmax(1), labels, num_classes=10),
            "auroc": TorchMetric(auroc, scores, labels),  # auroc = torchmetrics.classification.MulticlassAUROC(10)
        }
"""

from lockstep.metrics.averages import Mean, Total
from lockstep.metrics.classification import AUROC, F1, Accuracy, ConfusionMatrix, Precision, Recall
from lockstep.metrics.regression import MeanSquaredError, R2Score, RootMeanSquaredError
from lockstep.metrics.torchmetrics_adapter import TorchMetric

__all__ = [
    "AUROC",
    "F1",
    "Accuracy",
    "ConfusionMatrix",
    "Mean",
    "MeanSquaredError",
    "Precision",
    "R2Score",
    "Recall",
    "RootMeanSquaredError",
    "TorchMetric",
    "Total",
]
