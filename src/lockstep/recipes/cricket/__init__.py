"""Predict the next ball of a cricket match: a graph network over balls, players and innings.

This file has the recipe's config, without torch; `recipe.py` has the recipe.
"""

from typing import Annotated, Literal

from pydantic import Field

from lockstep.config.field_types import Flag, Frozen, PositiveInt
from lockstep.config.train_schema import Config
from lockstep.recipes.heads import Heads

Share = Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)]


class CricketModel(Frozen):
    width: PositiveInt = 64
    depth: PositiveInt = 2  # blocks of message passing
    heads: Heads = 4
    members: PositiveInt = 1  # independent networks that are averaged; the time grows in proportion
    identity_width: PositiveInt = 16  # of the learned embedding of each player
    dropout: Share = 0.15
    identity_dropout: Share = 0.8  # share of the players of a batch whose identity is hidden
    class_weights: Literal["none", "sqrt", "balanced"] = "none"  # of the outcomes; weights spoil the calibration


class CricketData(Frozen):
    path: str | None = None  # Cricsheet's JSON: a zip, a folder or a file; synthetic matches if omitted
    matches: PositiveInt = 300  # number of synthetic matches
    split: Literal["match", "date"] = "date"  # the test matches: the latest, or some chosen by a hash of their name
    test_share: Annotated[float, Field(gt=0, lt=1, strict=True, allow_inf_nan=False)] = 0.2
    evaluate_on: Literal["test", "validation"] = "test"  # validation: tune on matches held out from training
    memory: PositiveInt = 8  # earlier balls that each ball attends to
    picture: Flag = True  # draw the calibration at the end, with matplotlib


class CricketConfig(Config):
    model: CricketModel = CricketModel()
    data: CricketData = CricketData()


config_class = CricketConfig
