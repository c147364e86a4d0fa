"""The wing recipe: `lockstep train wing`, or `lockstep train wing -n 2 wing.objectives=pareto wing.speed=70.0`."""

from typing import Any

from lockstep.recipes.wing import WingConfig, WingModel
from lockstep.recipes.wing.fitness import PARETO_OBJECTIVES, SINGLE_OBJECTIVE, Assessor, FitnessWeights
from lockstep.recipes.wing.forces import Air
from lockstep.recipes.wing.genes import BASE
from lockstep.recipes.wing.wing_pictures import draw_pictures, require_matplotlib
from lockstep.search.evaluators import VectorizedEvaluator
from lockstep.search.problem import Problem
from lockstep.search.search_loop import Search

_BATCH = 16  # designs per call: about 10 ms, so that a small population keeps several processes busy


class WingRecipe:
    """A racing car's front wing: as much downforce as rules, drag and stiffness allow."""

    config_class = WingConfig

    def problem(self, config: WingConfig) -> Problem:
        if config.wing.pictures:
            require_matplotlib()
        assessor = _assessor(config.wing)
        if config.wing.objectives == "pareto":
            return Problem(assessor.genome, PARETO_OBJECTIVES, VectorizedEvaluator(assessor.trade, _BATCH))
        return Problem(assessor.genome, SINGLE_OBJECTIVE, VectorizedEvaluator(assessor.fitness, _BATCH))

    def base(self, config: WingConfig) -> dict[str, Any]:  # noqa: ARG002
        return dict(BASE)

    def conclude(self, search: Search, config: WingConfig) -> None:
        """Draw the best wing, the fitness over generations, and downforce against drag, into RUN/pictures."""
        folder = search.run.folder
        if config.wing.pictures and folder is not None and search.run.world.is_main:
            draw_pictures(folder / "pictures", search.archive, _assessor(config.wing))


recipe = WingRecipe()


def _assessor(wing: WingModel) -> Assessor:
    return Assessor(wing.panels, Air(speed=wing.speed), FitnessWeights(**wing.weights.model_dump()))
