"""Evolutionary search over designs, guided by a surrogate network: everything you need to set up and run one.

    import lockstep
    from lockstep.search import FloatGene, Genome, Objective, Problem, ScalarEvaluator, Search

    problem = Problem(Genome([FloatGene("x", -5, 5)]), (Objective("cost"),), ScalarEvaluator(lambda d: d["x"] ** 2))
    result = Search(lockstep.Run("runs/mine", world, seed=7), problem).run_complete_pipeline()

Names are imported on first use, so importing this package loads no torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.config.search_schema import SearchConfig
    from lockstep.recipes.search_pipeline import SearchPipeline, main_distributed
    from lockstep.search.design_archive import DesignArchive, ScoredDesign
    from lockstep.search.evaluators import ProgramEvaluator, ScalarEvaluator, VectorizedEvaluator
    from lockstep.search.evolution import Evolution, EvolutionSettings
    from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene
    from lockstep.search.problem import Evaluation, Evaluator, Objective, Problem
    from lockstep.search.search_job import SearchRecipe
    from lockstep.search.search_loop import Search, SearchResult, SearchSettings
    from lockstep.search.search_strategy import SearchStrategy
    from lockstep.search.surrogate_network import CurriculumStage, NetworkSettings
    from lockstep.world.keyed_random import keyed_generator
else:  # hidden from type checkers, so that they find misspelt names
    from lockstep.lazy_exports import lazy_exports

    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "config.search_schema": "SearchConfig",
            "recipes.search_pipeline": "SearchPipeline main_distributed",
            "search.design_archive": "DesignArchive ScoredDesign",
            "search.evaluators": "ProgramEvaluator ScalarEvaluator VectorizedEvaluator",
            "search.evolution": "Evolution EvolutionSettings",
            "search.genome": "ChoiceGene FloatGene Genome IntegerGene",
            "search.problem": "Evaluation Evaluator Objective Problem",
            "search.search_job": "SearchRecipe",
            "search.search_loop": "Search SearchResult SearchSettings",
            "search.search_strategy": "SearchStrategy",
            "search.surrogate_network": "CurriculumStage NetworkSettings",
            "world.keyed_random": "keyed_generator",
        },
    )

__all__ = [
    "ChoiceGene",
    "CurriculumStage",
    "DesignArchive",
    "Evaluation",
    "Evaluator",
    "Evolution",
    "EvolutionSettings",
    "FloatGene",
    "Genome",
    "IntegerGene",
    "NetworkSettings",
    "Objective",
    "Problem",
    "ProgramEvaluator",
    "ScalarEvaluator",
    "ScoredDesign",
    "Search",
    "SearchConfig",
    "SearchPipeline",
    "SearchRecipe",
    "SearchResult",
    "SearchSettings",
    "SearchStrategy",
    "VectorizedEvaluator",
    "keyed_generator",
    "main_distributed",
]
