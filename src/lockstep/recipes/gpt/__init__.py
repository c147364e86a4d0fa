"""Model the bytes of a text: a small GPT on any file, or on the manual pages that come with Python.

This file has the recipe's config, without torch; `recipe.py` has the recipe.
"""

from typing import Annotated

from pydantic import Field

from lockstep.config.field_types import Frozen, Positive, PositiveInt, Whole
from lockstep.config.train_schema import Config
from lockstep.recipes.heads import Heads


class GptModel(Frozen):
    width: PositiveInt = 128
    depth: PositiveInt = 2  # blocks
    heads: Heads = 4
    dropout: Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)] = 0.0


class GptData(Frozen):
    path: str | None = None  # any file, from the working directory; the topics of Python's help() if omitted
    length: PositiveInt = 64  # bytes that the model sees at a time
    sample: Whole = 400  # bytes of text to generate after training; 0: none
    temperature: Positive = 0.7  # of the sampling; a lower one favours likely bytes


class GptConfig(Config):
    model: GptModel = GptModel()
    data: GptData = GptData()


config_class = GptConfig
