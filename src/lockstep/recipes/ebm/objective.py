"""The training loss, the metrics of an evaluation, and the curriculum that depends on them.

    cross_entropy   −log p(y|x) at the image, plus `adversarial` × the same at its worst neighbour
    energy          `energy` × binary cross-entropy of log p(x): the image against a disguised outsider
    r1              `r1` / 2 × |∇ log p(x)|² at the image: keeps the density flat, and so bounded, at the data

A term of weight 0 is not computed. With all of them 0 this is a plain classifier.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.metrics.aggregator import MetricValue
from lockstep.metrics.classification import AUROC
from lockstep.recipes.ebm.attack import GradientAscent, disguise, mislead
from lockstep.recipes.ebm.energy_network import log_density
from lockstep.train.callbacks import Callback

if TYPE_CHECKING:
    from lockstep.train.trainer import Trainer


TermSums = dict[str, tuple[Tensor, int]]


class LossWeights(NamedTuple):
    """Weights of the loss terms besides the cross-entropy of clean images."""

    adversarial: float
    energy: float
    r1: float


PLAIN_WEIGHTS = LossWeights(0, 0, 0)


class Attacks(NamedTuple):
    """The attacks of training: on data, to be misclassified; on outsiders, to be taken for data."""

    inside: GradientAscent
    outside: GradientAscent


def loss_terms(
    model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], weights: LossWeights, attacks: Attacks
) -> TermSums:
    """Return each loss term as a sum over the batch's images, with their number."""
    images, labels, outsiders = batch
    images = images.detach().requires_grad_(weights.r1 > 0)
    scores = model(images)
    density = log_density(scores)
    cross_entropy = F.cross_entropy(scores, labels, reduction="sum")
    if weights.adversarial:
        misleading = mislead(model, images, labels, attacks.inside)
        adversarial = F.cross_entropy(model(misleading), labels, reduction="sum")
        cross_entropy = cross_entropy + weights.adversarial * adversarial
    terms = {"cross_entropy": cross_entropy}
    if weights.energy:
        disguised = log_density(model(disguise(model, outsiders, attacks.outside)))
        terms["energy"] = weights.energy * (F.softplus(-density) + F.softplus(disguised)).sum()
    if weights.r1:
        (slope,) = torch.autograd.grad(density.sum(), images, create_graph=True)
        terms["r1"] = weights.r1 / 2 * slope.square().sum()
    return {name: (total, len(labels)) for name, total in terms.items()}


class EvaluationAttacks(NamedTuple):
    """The attacks of an evaluation: two that never change, and the one that training currently uses."""

    inside: GradientAscent
    outside: GradientAscent
    in_training: GradientAscent


def robustness_metrics(
    model: nn.Module, batch: list[Tensor], families: tuple[str, ...], attacks: EvaluationAttacks
) -> Mapping[str, MetricValue]:
    """Return the metrics of one chunk of the test set; the recipe's README explains them."""
    images, labels, known, unseen = batch
    scores = model(images)
    density = log_density(scores)
    unseen_scores = model(unseen.flatten(0, 1)).unflatten(0, unseen.shape[:2])
    unseen_density = unseen_scores.logsumexp(2)
    # One family per image, in turn, because attacks take most of the time.
    places = torch.arange(len(images), device=images.device)
    chosen = unseen[places, places % len(families)]
    disguised = log_density(model(disguise(model, chosen, attacks.outside)))
    as_trained = log_density(model(disguise(model, known, attacks.in_training)))
    misleading = model(mislead(model, images, labels, attacks.inside))
    count = len(labels)
    return {
        "accuracy": ((scores.argmax(1) == labels).sum(), count),
        "robust_accuracy": ((misleading.argmax(1) == labels).sum(), count),
        "auroc": _auroc(density, unseen_density),
        "auroc_attacked": _auroc(density, disguised),
        "auroc_confidence": _auroc(_confidence(scores), _confidence(unseen_scores)),
        CRITERION: _auroc(density, as_trained),
        **{f"auroc/{name}": _auroc(density, unseen_density[:, n]) for n, name in enumerate(families)},
        "energy": (-density.sum(), count),
        "energy_unseen": (-unseen_density.sum(), unseen_density.numel()),
        "energy_disguised": (-disguised.sum(), count),
    }


def _auroc(inside: Tensor, outside: Tensor) -> AUROC:
    """The probability that an image of the data has the higher value."""
    values = torch.cat([inside, outside.flatten()])
    return AUROC(values, torch.arange(len(values), device=values.device) < len(inside))


def _confidence(scores: Tensor) -> Tensor:
    """The highest class probability: the usual out-of-distribution score of a plain classifier."""
    return scores.softmax(-1).amax(-1)


CRITERION = "auroc_in_training"  # images against outsiders of the trained families, disguised as in training


class Curriculum(Callback):
    """Adds a step to the attack on outsiders after each evaluation that meets the goal. Saved with the run."""

    def __init__(self, first: int, last: int, goal: float) -> None:
        self.steps = first
        self._last = last
        self._goal = goal

    def on_evaluate(self, trainer: "Trainer", metrics: Mapping[str, Any]) -> None:
        if metrics[CRITERION] >= self._goal and self.steps < self._last:
            self.steps += 1
            trainer.run.log(disguise_steps=self.steps)

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.steps = state["steps"]
