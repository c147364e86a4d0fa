"""Search for the front wing of a racing car: geometry, aerodynamics, structure, rules, and their optimum.

This file has the recipe's config, without torch; `recipe.py` has the recipe.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from lockstep.config.field_types import Flag, Frozen, NonNegative, Positive, PositiveInt
from lockstep.config.search_schema import SearchConfig

_MIN_PANELS = 16
_MAX_PANELS = 400  # a batch then takes most of a gigabyte; memory grows with the square of the panels


def _is_even_and_bounded(value: int) -> int:
    if not _MIN_PANELS <= value <= _MAX_PANELS or value % 2:  # even, so that the nose is a corner of the outline
        raise PydanticCustomError("panels", f"expected an even number from {_MIN_PANELS} to {_MAX_PANELS}, got {value}")
    return value


class WingWeights(Frozen):
    performance: NonNegative = 1.0
    rules: NonNegative = 1.0
    structure: NonNegative = 1.0
    drag: NonNegative = 3.0  # one newton of drag costs as much as this many newtons of downforce


class WingModel(Frozen):
    objectives: Literal["single", "pareto"] = "single"  # pareto: downforce, drag and deflection
    speed: Positive = 60.0  # m/s
    panels: Annotated[PositiveInt, AfterValidator(_is_even_and_bounded)] = 40  # per element
    weights: WingWeights = WingWeights()
    pictures: Flag = True  # draw them at the end, with matplotlib


class WingConfig(SearchConfig):
    wing: WingModel = WingModel()


config_class = WingConfig
