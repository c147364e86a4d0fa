"""The ebm recipe: `lockstep train ebm`, or `lockstep train ebm -n 2 data.path=FOLDER mode=plain`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.config.train_schema import MeshConfig
from lockstep.errors import UserError
from lockstep.metrics.aggregator import MetricValue
from lockstep.recipes.ebm import (
    EbmConfig,
    InsideConfig,
    OutsideConfig,
)
from lockstep.recipes.ebm.attack import GradientAscent, before_and_after, imagined
from lockstep.recipes.ebm.energy_network import Classifier
from lockstep.recipes.ebm.loaders import EvaluationImages, open_sources, pairs
from lockstep.recipes.ebm.objective import (
    PLAIN_WEIGHTS,
    Attacks,
    Curriculum,
    EvaluationAttacks,
    LossWeights,
    TermSums,
    loss_terms,
    robustness_metrics,
)
from lockstep.train.callbacks import Callback
from lockstep.train.recipe import Splits
from lockstep.train.run import Run
from lockstep.world.keyed_random import keyed_generator


class EbmRecipe:
    """A joint energy-based model. One instance per run: it holds the images and the state of the curriculum."""

    config_class = EbmConfig

    def __init__(self, config: EbmConfig) -> None:
        self._weights = LossWeights(**dict(config.weights)) if config.mode == "joint" else PLAIN_WEIGHTS
        is_sharded = config.parallel == "fsdp" or isinstance(config.parallel, MeshConfig)
        if self._weights.r1 and is_sharded:
            raise UserError(
                f"weights.r1={self._weights.r1:g} needs second derivatives, which torch cannot compute where "
                "parallel=fsdp or a mesh shards the model: set weights.r1=0, or parallel=zero"
            )
        self._sources = open_sources(config.data.path, config.data.out_path, config.data.test_every)
        self._attack = config.attack
        self._curriculum = Curriculum(config.curriculum.first, config.curriculum.last, config.curriculum.auroc)

    def model(self, config: EbmConfig) -> nn.Module:
        channels, height, width = self._sources.images.shape
        num_classes = len(self._sources.images.classes)
        return Classifier(channels, min(height, width), num_classes, config.model.width, config.model.depth)

    def data(self, config: EbmConfig) -> Splits:
        return Splits(
            pairs(self._sources, config.seed, padding=config.data.padding, flip=config.data.flip),
            EvaluationImages(self._sources),
        )

    def loss(self, model: nn.Module, batch: Any) -> TermSums:
        return loss_terms(
            model, batch, self._weights, Attacks(GradientAscent(**dict(self._attack.inside)), self._disguise)
        )

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, MetricValue]:
        steps = self._attack.evaluation_steps
        inside, outside = (_ascent(ball, steps) for ball in (self._attack.inside, self._attack.outside))
        return robustness_metrics(
            model, batch, self._sources.unseen_families, EvaluationAttacks(inside, outside, self._disguise)
        )

    def callbacks(self, config: EbmConfig) -> Sequence[Callback]:
        return [self._curriculum] if config.mode == "joint" else []

    def conclude(self, run: Run, model: nn.Module, config: EbmConfig) -> None:
        """Log images that the model generates for each class, and outsiders disguised as data."""
        images = self._sources.images
        ascent = GradientAscent(**dict(config.pictures))
        draw = keyed_generator(run.seed, "pictures")
        run.log_image("imagined", imagined(model, images.shape, len(images.classes), ascent, draw))
        outside = _ascent(config.attack.outside, config.attack.evaluation_steps)
        unseen = torch.cat([EvaluationImages(self._sources)[index][3] for index in range(2)])
        run.log_image("disguised", before_and_after(model, unseen, outside))

    @property
    def _disguise(self) -> GradientAscent:
        """The attack that training currently makes on outsiders."""
        return _ascent(self._attack.outside, self._curriculum.steps)


recipe = EbmRecipe


def _ascent(ball: InsideConfig | OutsideConfig, steps: int) -> GradientAscent:
    return GradientAscent(ball.radius, ball.rate, steps)
