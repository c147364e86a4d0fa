"""What a model is judged by: the clean and the attacked, its own data and outsiders of families it was not shown."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lockstep.metrics.auroc import AUROC
from lockstep.metrics.tally import Part
from lockstep.recipes.ebm.attack import Climb, disguise, mislead
from lockstep.recipes.ebm.curriculum import CRITERION
from lockstep.recipes.ebm.network import log_density


class Examination(NamedTuple):
    """The attacks of an evaluation: two that never change, and the one that training uses now."""

    inside: Climb
    outside: Climb
    in_training: Climb


def judge(model: nn.Module, batch: list[Tensor], families: tuple[str, ...], attacks: Examination) -> Mapping[str, Part]:
    """A chunk's part of each metric; see the recipe's README for what they mean."""
    images, labels, known, unseen = batch
    scores = model(images)
    density = log_density(scores)
    unseen_scores = model(unseen.flatten(0, 1)).unflatten(0, unseen.shape[:2])
    unseen_density = unseen_scores.logsumexp(2)
    # One of the families for each image, in turn: attacks are most of the work.
    places = torch.arange(len(images), device=images.device)
    chosen = unseen[places, places % len(families)]
    disguised = log_density(model(disguise(model, chosen, attacks.outside)))
    as_trained = log_density(model(disguise(model, known, attacks.in_training)))
    misleading = model(mislead(model, images, labels, attacks.inside))
    count = len(labels)
    return {
        "accuracy": ((scores.argmax(1) == labels).sum(), count),
        "robust_accuracy": ((misleading.argmax(1) == labels).sum(), count),
        "auroc": _told_apart(density, unseen_density),
        "auroc_attacked": _told_apart(density, disguised),
        "auroc_confidence": _told_apart(_confidence(scores), _confidence(unseen_scores)),
        CRITERION: _told_apart(density, as_trained),
        **{f"auroc/{name}": _told_apart(density, unseen_density[:, n]) for n, name in enumerate(families)},
        "energy": (-density.sum(), count),
        "energy_unseen": (-unseen_density.sum(), unseen_density.numel()),
        "energy_disguised": (-disguised.sum(), count),
    }


def _told_apart(inside: Tensor, outside: Tensor) -> AUROC:
    """How likely an image of the data has the higher value."""
    values = torch.cat([inside, outside.flatten()])
    return AUROC(values, torch.arange(len(values), device=values.device) < len(inside))


def _confidence(scores: Tensor) -> Tensor:
    """The probability of the likeliest class: how plain classifiers are usually asked whether they know an image."""
    return scores.softmax(-1).amax(-1)
