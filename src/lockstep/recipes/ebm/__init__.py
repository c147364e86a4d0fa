"""A classifier that is also an energy-based model: robust to attacks and to out-of-distribution images.

This file has the recipe's config, without torch; `recipe.py` has the recipe.
"""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from lockstep.config.field_types import Flag, Frozen, NonNegative, Positive, PositiveInt, Whole
from lockstep.config.train_schema import Config


class EbmModel(Frozen):
    width: PositiveInt = 16  # channels of the first layer
    depth: PositiveInt = 1  # residual blocks at each size


class EbmData(Frozen):
    path: str | None = None  # a folder of images; scikit-learn's digits if omitted
    out_path: str | None = None  # a folder of out-of-distribution images; generated ones if omitted
    padding: Whole = 0  # training images are shifted by up to this many pixels
    flip: Flag = False  # and half of them are mirrored
    test_every: PositiveInt = 5  # of the digits, image i is a test image when i % test_every == 0


class WeightsConfig(Frozen):
    """Weights of the loss terms besides the cross-entropy of clean images; see objective.py."""

    adversarial: NonNegative = 1.0
    energy: NonNegative = 1.0
    r1: NonNegative = 0.1


class InsideConfig(Frozen):
    """The attack on images: L2 radius, step length and number of steps, for pixels from 0 to 1."""

    radius: Positive = 0.5
    rate: Positive = 0.15
    steps: PositiveInt = 5


class OutsideConfig(Frozen):
    """The attack on outsiders; the curriculum sets the number of steps."""

    radius: Positive = 1.5
    rate: Positive = 0.2


class AttackConfig(Frozen):
    """Both attacks."""

    inside: InsideConfig = InsideConfig()
    outside: OutsideConfig = OutsideConfig()
    evaluation_steps: PositiveInt = 20  # of both attacks, fixed so that evaluations are comparable


class CurriculumConfig(Frozen):
    """How many steps the attack on outsiders takes during training."""

    first: PositiveInt = 1
    last: PositiveInt = Field(default=10, validate_default=True)
    auroc: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.9  # add a step after each evaluation that reaches this

    @field_validator("last")
    @classmethod
    def _is_at_least_the_first(cls, value: int, info: ValidationInfo) -> int:
        first = info.data.get("first", value)
        if value < first:
            raise PydanticCustomError(
                "curriculum", "expected first={first} or more, got {last}", {"first": first, "last": value}
            )
        return value


class PicturesConfig(Frozen):
    """The gradient ascent from noise to an image of a class."""

    radius: Positive = 4.0
    rate: Positive = 0.1
    steps: PositiveInt = 60


class EbmConfig(Config):
    mode: Literal["joint", "plain"] = "joint"  # plain: cross-entropy alone, for comparison
    model: EbmModel = EbmModel()
    data: EbmData = EbmData()
    weights: WeightsConfig = WeightsConfig()
    attack: AttackConfig = AttackConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    pictures: PicturesConfig = PicturesConfig()


config_class = EbmConfig
