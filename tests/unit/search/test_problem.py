"""Objectives and problems: mistakes are reported where they are made, and evaluations can be written and read back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.errors import UserError
from lockstep.search.evaluators import ScalarEvaluator, VectorizedEvaluator
from lockstep.search.evolution import EvolutionSettings
from lockstep.search.genome import ChoiceGene, FloatGene, Genome, IntegerGene
from lockstep.search.problem import Evaluation, Objective, Problem
from lockstep.search.search_loop import Search, SearchResult, SearchSettings
from lockstep.train.run import Run
from lockstep.world.world import World

GENOME = Genome([FloatGene("x", -1.0, 1.0), IntegerGene("n", 1, 3, group="whole"), ChoiceGene("kind", ("a", "b"))])
EVALUATOR = ScalarEvaluator(lambda design: design["x"])


def test_a_maximized_objective_costs_less_the_larger_it_is() -> None:
    problem = Problem(GENOME, (Objective("drag"), Objective("lift", "max")), EVALUATOR)
    assert problem.signs.tolist() == [1.0, -1.0]
    assert problem.signs.dtype == torch.float64


@pytest.mark.parametrize("direction", ["maximise", "minimize", "", None])
def test_an_unknown_direction_is_an_error(direction: Any) -> None:
    with pytest.raises(UserError, match=r"objective lift: direction=.*expected 'min' or 'max'"):
        Objective("lift", direction)


def test_wrong_objectives_and_evaluators_are_refused() -> None:
    with pytest.raises(UserError, match=r"objectives: expected Objective\(name, .* got 'lift'"):
        Problem(GENOME, ("lift",), EVALUATOR)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"evaluator: expected ScalarEvaluator\(function\), .* got <function"):
        Problem(GENOME, (Objective("lift"),), lambda _: 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("names", [("drag", "lift"), ("lift",), ("lift", "drag", "mass"), "lift"])
def test_values_by_name_must_be_in_the_order_of_the_objectives(names: Any) -> None:
    objectives = (Objective("lift", "max"), Objective("drag"))
    with pytest.raises(UserError, match="expected one for each objective, in their order: lift, drag"):
        Problem(GENOME, objectives, ScalarEvaluator(lambda design: design, names=names))
    Problem(GENOME, objectives, ScalarEvaluator(lambda design: design, names=("lift", "drag")))
    Problem(GENOME, objectives, ScalarEvaluator(lambda design: design, names=("L", "D")))


def test_objectives_need_different_names() -> None:
    with pytest.raises(UserError, match="expected one or more with unique names, got lift, drag, lift"):
        Problem(GENOME, (Objective("lift"), Objective("drag"), Objective("lift", "max")), EVALUATOR)
    with pytest.raises(UserError, match="objectives: expected one or more with unique names, got none"):
        Problem(GENOME, (), EVALUATOR)


@pytest.mark.parametrize(
    "evaluation", [Evaluation((1.0, -0.1)), Evaluation((1e-320,)), Evaluation(failure="ValueError")]
)
def test_an_evaluation_reads_back_as_it_was_written(evaluation: Evaluation) -> None:
    assert Evaluation.from_json(json.loads(json.dumps(evaluation.as_json()))) == evaluation


@pytest.mark.parametrize("value", [None, 1.0, [1], ["1.0"], [None], {"values": [1.0]}, [[1.0]]])
def test_text_that_is_no_evaluation_is_refused(value: Any) -> None:
    with pytest.raises(UserError, match="not an evaluation"):
        Evaluation.from_json(value)


OTHERS = {
    "a bound": Problem(Genome([FloatGene("x", -1.0, 2.0), *GENOME.genes[1:]]), (Objective("f"),), EVALUATOR),
    "the order of genes": Problem(Genome(GENOME.genes[::-1]), (Objective("f"),), EVALUATOR),
    "a kind": Problem(Genome([IntegerGene("x", -1, 1), *GENOME.genes[1:]]), (Objective("f"),), EVALUATOR),
    "a group": Problem(Genome([FloatGene("x", -1.0, 1.0, group="g"), *GENOME.genes[1:]]), (Objective("f"),), EVALUATOR),
    "an option": Problem(Genome([*GENOME.genes[:2], ChoiceGene("kind", ("a", "c"))]), (Objective("f"),), EVALUATOR),
    "a direction": Problem(GENOME, (Objective("f", "max"),), EVALUATOR),
    "an objective": Problem(GENOME, (Objective("f"), Objective("g")), EVALUATOR),
    "the batch": Problem(GENOME, (Objective("f"),), VectorizedEvaluator(lambda designs: designs[:, 0], batch=2)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_problems_that_differ_are_described_differently(what: str) -> None:
    mine = json.loads(json.dumps(Problem(GENOME, (Objective("f"),), EVALUATOR).description()))
    again = Problem(Genome(GENOME.genes), [Objective("f")], ScalarEvaluator(len))  # type: ignore[arg-type]  # a list will do
    assert again.objectives == (Objective("f"),)
    assert json.loads(json.dumps(again.description())) == mine
    assert json.loads(json.dumps(OTHERS[what].description())) != mine


def search(folder: Path, problem: Problem, settings: SearchSettings) -> SearchResult:
    return Search(Run(folder, World(), seed=1, sinks=[]), problem, settings).run_complete_pipeline()


def test_a_search_resumes_only_with_the_problem_and_settings_it_began_with(tmp_path: Path) -> None:
    mine = Problem(GENOME, (Objective("f"),), EVALUATOR)
    settings = SearchSettings(population_size=4, max_generations=1, network=None)
    search(tmp_path, mine, settings)
    with pytest.raises(UserError, match=r"another config.*\n.*objectives: {'f': 'min'} → {'f': 'max'}"):
        search(tmp_path, OTHERS["a direction"], settings)
    with pytest.raises(UserError, match="population_size: 4 → 5"):
        search(tmp_path, mine, replace(settings, population_size=5))
    with pytest.raises(UserError, match="evolution: "):
        search(tmp_path, mine, replace(settings, evolution=EvolutionSettings(mutation_rate=0.5)))
    assert search(tmp_path, mine, replace(settings, max_generations=2, patience=5, save_frequency=2)).generations == 2


@pytest.mark.parametrize("what", ["a gene", "bounds", "an objective", "the direction"])
def test_force_does_not_mix_designs_of_different_problems(tmp_path: Path, what: str) -> None:
    def go(genes: list[FloatGene], *objectives: Objective, force: bool = False) -> SearchResult:
        problem = Problem(Genome(genes), objectives, ScalarEvaluator(lambda design: [design["x"]] * len(objectives)))
        run = Run(tmp_path, World(), seed=7, sinks=[], resume="force" if force else "auto")
        return Search(
            run, problem, SearchSettings(population_size=4, max_generations=2, network=None)
        ).run_complete_pipeline()

    x, y, cost = FloatGene("x", 0, 1), FloatGene("y", 0, 1), Objective("cost")
    go([x], cost)
    others: dict[str, Any] = {
        "a gene": ([x, y], cost),
        "bounds": ([FloatGene("x", 0, 0.01)], cost),
        "an objective": ([x], cost, Objective("mass")),
        "the direction": ([x], Objective("cost", "max")),
    }
    with pytest.raises(UserError, match="other genes, bounds or objectives: choose another folder"):
        go(*others[what], force=True)
