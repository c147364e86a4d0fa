"""Run it: `lockstep train wing`, or `lockstep train wing -n 2 wing.objectives=pareto wing.speed=70.0`."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from lockstep.config.fields import Count, Flag, Frozen, NonNegative, Positive
from lockstep.config.search import SearchConfig
from lockstep.recipes.wing.album import draw_all
from lockstep.recipes.wing.fitness import PARETO, SINGLE, Assessor, Weights
from lockstep.recipes.wing.forces import Air
from lockstep.recipes.wing.genes import BASE
from lockstep.recipes.wing.pictures import require_matplotlib
from lockstep.search.evaluators import Together
from lockstep.search.problem import Problem
from lockstep.search.search import Search

_FEWEST_PANELS = 16
_MOST_PANELS = 400  # a batch takes most of a gigabyte then, and its memory grows with their square
_BATCH = 16  # designs at a time: some 10 ms, so that several processes find work in a small population


def _even(value: int) -> int:
    if not _FEWEST_PANELS <= value <= _MOST_PANELS or value % 2:  # the nose is a corner
        raise PydanticCustomError("panels", f"expected an even number from {_FEWEST_PANELS} to {_MOST_PANELS}")
    return value


class WingWeights(Frozen):
    performance: NonNegative = 1.0
    rules: NonNegative = 1.0
    structure: NonNegative = 1.0
    drag: NonNegative = 3.0  # newtons of downforce that a newton of drag must bring


class WingModel(Frozen):
    objectives: Literal["single", "pareto"] = "single"  # pareto: downforce, drag and deflection
    speed: Positive = 60.0  # m/s
    panels: Annotated[Count, AfterValidator(_even)] = 40  # of each element
    weights: WingWeights = WingWeights()
    pictures: Flag = True  # at the end, with matplotlib


class WingConfig(SearchConfig):
    wing: WingModel = WingModel()


class Wing:
    """A racing car's front wing: as much downforce as rules, drag and stiffness let it have."""

    config_class = WingConfig

    def problem(self, config: WingConfig) -> Problem:
        if config.wing.pictures:
            require_matplotlib()
        assessor = _assessor(config.wing)
        if config.wing.objectives == "pareto":
            return Problem(assessor.genome, PARETO, Together(assessor.trade, _BATCH))
        return Problem(assessor.genome, SINGLE, Together(assessor.fitness, _BATCH))

    def base(self, config: WingConfig) -> dict[str, Any]:  # noqa: ARG002
        return dict(BASE)

    def conclude(self, search: Search, config: WingConfig) -> None:
        """Draw the best wing, the way there, and downforce against drag, into RUN/pictures."""
        folder = search.run.journal.folder
        if config.wing.pictures and folder is not None and search.run.world.is_main:
            draw_all(folder.path / "pictures", search.archive, _assessor(config.wing))


recipe = Wing()


def _assessor(wing: WingModel) -> Assessor:
    return Assessor(wing.panels, Air(speed=wing.speed), Weights(**wing.weights.model_dump()))
