"""Run it: `lockstep train ebm`, or `lockstep train ebm -n 2 data.path=FOLDER mode=plain`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from torch import nn

from lockstep.config.fields import Count, Flag, Frozen, NonNegative, Positive, Whole
from lockstep.config.schema import Config
from lockstep.config.strategies import MeshConfig
from lockstep.errors import UserError
from lockstep.metrics.tally import Part
from lockstep.recipes.ebm.attack import Climb
from lockstep.recipes.ebm.curriculum import Curriculum
from lockstep.recipes.ebm.judgement import Examination, judge
from lockstep.recipes.ebm.loaders import ExaminedImages, open_sources, pairs
from lockstep.recipes.ebm.network import Classifier
from lockstep.recipes.ebm.objective import PLAIN, Attacks, Terms, Weights, terms_of
from lockstep.recipes.ebm.pictures import before_and_after, imagined
from lockstep.train.callbacks import Callback
from lockstep.train.recipe import Splits
from lockstep.train.run import Run
from lockstep.world.randomness import stream


class EbmModel(Frozen):
    width: Count = 16  # channels of the first layer
    depth: Count = 1  # residual blocks at each size


class EbmData(Frozen):
    path: str | None = None  # a folder of images; scikit-learn's digits if there is none
    out_path: str | None = None  # a folder of images that are none of those; generated ones if there is none
    padding: Whole = 0  # training images are shifted by up to so many pixels
    flip: Flag = False  # and mirrored, half of them
    test_every: Count = 5  # where the images come without a split: one in so many is for the test


class WeightsConfig(Frozen):
    """The terms of the loss, beside the cross-entropy of clean images; see objective.py."""

    adversarial: NonNegative = 1.0
    energy: NonNegative = 1.0
    r1: NonNegative = 0.1


class InsideConfig(Frozen):
    """How far images are attacked, in the L2 norm of pixels from 0 to 1; in so many steps of length `rate`."""

    radius: Positive = 0.5
    rate: Positive = 0.15
    steps: Count = 5


class OutsideConfig(Frozen):
    """The same for outsiders; how many steps, says the curriculum."""

    radius: Positive = 1.5
    rate: Positive = 0.2


class AttackConfig(Frozen):
    inside: InsideConfig = InsideConfig()
    outside: OutsideConfig = OutsideConfig()
    evaluation_steps: Count = 20  # of both attacks, so that evaluations can be compared


class CurriculumConfig(Frozen):
    """The steps of the attack on outsiders while training."""

    first: Count = 1
    last: Count = Field(default=10, validate_default=True)
    auroc: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.9  # one more after each evaluation that reaches this

    @field_validator("last")
    @classmethod
    def _comes_after_the_first(cls, value: int, info: ValidationInfo) -> int:
        first = info.data.get("first", value)
        if value < first:
            raise PydanticCustomError("curriculum", "expected first={first} or more", {"first": first})
        return value


class PicturesConfig(Frozen):
    """The climb from noise to an image of a class."""

    radius: Positive = 4.0
    rate: Positive = 0.1
    steps: Count = 60


class EbmConfig(Config):
    mode: Literal["joint", "plain"] = "joint"  # plain: cross-entropy alone, to compare with
    model: EbmModel = EbmModel()
    data: EbmData = EbmData()
    weights: WeightsConfig = WeightsConfig()
    attack: AttackConfig = AttackConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    pictures: PicturesConfig = PicturesConfig()


class Ebm:
    """One run: its images, and how far its curriculum has come."""

    config_class = EbmConfig

    def __init__(self, config: EbmConfig) -> None:
        self._weights = Weights(**dict(config.weights)) if config.mode == "joint" else PLAIN
        is_cut_up = config.parallel == "fsdp" or isinstance(config.parallel, MeshConfig)
        if self._weights.r1 and is_cut_up:
            raise UserError(
                f"weights.r1={self._weights.r1:g} needs gradients of gradients, which torch does not give where "
                "parallel=fsdp or a mesh cuts the model up: set weights.r1=0, or parallel=zero"
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
            ExaminedImages(self._sources),
        )

    def loss(self, model: nn.Module, batch: Any) -> Terms:
        return terms_of(model, batch, self._weights, Attacks(Climb(**dict(self._attack.inside)), self._disguise))

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, Part]:
        steps = self._attack.evaluation_steps
        inside, outside = (_climb(ball, steps) for ball in (self._attack.inside, self._attack.outside))
        return judge(model, batch, self._sources.unseen_families, Examination(inside, outside, self._disguise))

    def callbacks(self, config: EbmConfig) -> Sequence[Callback]:
        return [self._curriculum] if config.mode == "joint" else []

    def conclude(self, run: Run, model: nn.Module, config: EbmConfig) -> None:
        """Show what the model thinks of each class, and what makes outsiders look like data to it."""
        images = self._sources.images
        climb = Climb(**dict(config.pictures))
        draw = stream(run.seed, "pictures")
        run.log_image("imagined", imagined(model, images.shape, len(images.classes), climb, draw))
        outside = _climb(config.attack.outside, config.attack.evaluation_steps)
        unseen = torch.cat([ExaminedImages(self._sources)[index][3] for index in range(2)])
        run.log_image("disguised", before_and_after(model, unseen, outside))

    @property
    def _disguise(self) -> Climb:
        """What training makes of outsiders now."""
        return _climb(self._attack.outside, self._curriculum.steps)


recipe = Ebm


def _climb(ball: InsideConfig | OutsideConfig, steps: int) -> Climb:
    return Climb(ball.radius, ball.rate, steps)
