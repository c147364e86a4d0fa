"""What training asks of the model: to classify, also under attack; and to tell its data from disguised other images.

    cross_entropy   −log p(y|x) at the image, plus `adversarial` × the same at its worst neighbour
    energy          `energy` × binary cross-entropy of log p(x): the image against a disguised outsider
    r1              `r1` / 2 × |∇ log p(x)|² at the image: flat where the data is, so that it neither runs away

A term of weight 0 is not computed. With all of them 0 this is a plain classifier.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.recipes.ebm.attack import Climb, disguise, mislead
from lockstep.recipes.ebm.network import log_density

Terms = dict[str, tuple[Tensor, int]]


class Weights(NamedTuple):
    adversarial: float
    energy: float
    r1: float


PLAIN = Weights(0, 0, 0)


class Attacks(NamedTuple):
    """How training attacks: the data, to be misclassified; outsiders, to be taken for data."""

    inside: Climb
    outside: Climb


def terms_of(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], weights: Weights, attacks: Attacks) -> Terms:
    """The terms' sums over the batch's images, with their number."""
    images, labels, outsiders = batch
    images = images.detach().requires_grad_(weights.r1 > 0)
    scores = model(images)
    density = log_density(scores)
    cross_entropy = F.cross_entropy(scores, labels, reduction="sum")
    if weights.adversarial:
        misleading = mislead(model, images, labels, attacks.inside)
        harm = F.cross_entropy(model(misleading), labels, reduction="sum")
        cross_entropy = cross_entropy + weights.adversarial * harm
    terms = {"cross_entropy": cross_entropy}
    if weights.energy:
        disguised = log_density(model(disguise(model, outsiders, attacks.outside)))
        terms["energy"] = weights.energy * (F.softplus(-density) + F.softplus(disguised)).sum()
    if weights.r1:
        (slope,) = torch.autograd.grad(density.sum(), images, create_graph=True)
        terms["r1"] = weights.r1 / 2 * slope.square().sum()
    return {name: (total, len(labels)) for name, total in terms.items()}
