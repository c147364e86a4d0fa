"""An invalid search recipe is an error of one line, and no folder is left behind."""

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.search_schema import SearchConfig
from lockstep.errors import UserError
from lockstep.events.run_folder import RunFolder
from lockstep.search.evaluators import ScalarEvaluator
from lockstep.search.genome import FloatGene, Genome
from lockstep.search.problem import Objective, Problem
from lockstep.search.search_job import search_recipe
from lockstep.world.world import World

PROBLEM = Problem(Genome([FloatGene("x", 0, 1)]), (Objective("cost"),), ScalarEvaluator(lambda design: design["x"]))


@pytest.mark.parametrize(
    ("problem", "base", "message"),
    [
        (None, None, r"mine: expected a lockstep.search.Problem from its problem\(config\), got None"),
        (PROBLEM, [0.5], r"mine: expected a design by gene from its base\(config\), got \[0.5\]"),
        (PROBLEM, {"x": 7}, "gene x: expected a number from 0 to 1, got 7"),
    ],
)
def test_an_invalid_recipe_is_an_error_of_one_line(tmp_path: Path, problem: Any, base: Any, message: str) -> None:
    class Recipe:
        config_class = SearchConfig

        def problem(self, config: SearchConfig) -> Problem:
            return problem  # type: ignore[no-any-return]

        def base(self, config: SearchConfig) -> Any:
            return base

    config = SearchConfig(recipe="mine", max_generations=1, population_size=2, network=None)
    with pytest.raises(UserError, match=message):
        search_recipe(Recipe(), config, World(), RunFolder(tmp_path / "run"), [])
    assert not (tmp_path / "run").exists()
