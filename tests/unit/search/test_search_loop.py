"""The search loop on one process: its order, its ends, resuming, and custom strategies."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.search import design_archive
from lockstep.search.evaluation_pool import EvaluationPool
from lockstep.search.evaluators import ScalarEvaluator, VectorizedEvaluator
from lockstep.search.genome import FloatGene, Genome
from lockstep.search.pareto import is_nondominated
from lockstep.search.problem import Objective, Problem
from lockstep.search.search_loop import Search, SearchResult, SearchSettings
from lockstep.train.run import Run
from lockstep.world.world import World

GENOME = Genome([FloatGene(f"x{number}", -5, 5) for number in range(4)])


def cost(designs: Tensor) -> Tensor:
    return designs.square().sum(1)


PROBLEM = Problem(GENOME, (Objective("cost"),), VectorizedEvaluator(cost, batch=4))


def search(folder: Path | None, problem: Problem = PROBLEM, **options: Any) -> Search:
    strategy = options.pop("strategy", None)
    settings = {"population_size": 6, "max_generations": 4, "network": None} | options
    return Search(Run(folder, World(), seed=1, sinks=[]), problem, SearchSettings(**settings), strategy=strategy)


def found(folder: Path | None, problem: Problem = PROBLEM, **options: Any) -> SearchResult:
    return search(folder, problem, **options).run_complete_pipeline()


def test_the_eight_steps_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def note(target: type, name: str) -> None:
        original = getattr(target, name)

        def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
            made.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(target, name, noted)

    for target, name in (
        (Search, "create_population"),
        (Search, "broadcast_population"),
        (EvaluationPool, "evaluate"),
        (Search, "generate_next_population"),
        (Search, "train_network"),
    ):
        note(target, name)
    found(None, max_generations=2)
    one = ["evaluate", "generate_next_population", "broadcast_population", "train_network"]
    assert made == ["create_population", "broadcast_population", *one, *one]


def test_it_gets_better_and_says_so(tmp_path: Path) -> None:
    result = found(tmp_path, population_size=20, max_generations=12)
    events = [event for event in read_jsonl(tmp_path / "events.jsonl") if "generation" in event]
    bests = [event["best"]["cost"] for event in events]
    assert bests == sorted(bests, reverse=True)
    assert result.best is not None
    assert result.best.values["cost"] == bests[-1] < bests[0] / 3
    assert result.best.values["cost"] == cost(GENOME.row(result.best.design)[None]).item()
    assert [event["design"] is not None for event in events] == [
        number == 0 or bests[number] < bests[number - 1] for number in range(12)
    ]


def test_a_generation_is_not_compared_with_all_before_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at = []
    monkeypatch.setattr(
        design_archive, "is_nondominated", lambda costs: looked_at.append(len(costs)) or is_nondominated(costs)
    )
    assert found(None, max_generations=20).evaluations > 100
    assert max(looked_at) < 10


def test_without_an_improvement_it_ends_and_stays_ended(tmp_path: Path) -> None:
    flat = Problem(GENOME, (Objective("cost"),), VectorizedEvaluator(lambda designs: torch.ones(len(designs))))
    first = found(tmp_path, flat, max_generations=50, patience=3)
    assert first.generations == 4
    assert first.ended == "no improvement in 3 generations"
    assert found(tmp_path, flat, max_generations=50, patience=3) == first
    assert found(tmp_path, flat, max_generations=60, patience=3) == first


def test_without_patience_left_asking_for_more_generations_adds_none(tmp_path: Path) -> None:
    """It would have ended at the same place if that many had been requested from the beginning."""
    flat = Problem(GENOME, (Objective("cost"),), VectorizedEvaluator(lambda designs: torch.ones(len(designs))))
    first = found(tmp_path, flat, max_generations=4, patience=3)
    assert found(tmp_path, flat, max_generations=50, patience=3) == first


def test_an_ended_search_continues_with_more_patience_or_time(tmp_path: Path) -> None:
    whole = found(tmp_path / "whole", max_generations=8)
    ended = found(tmp_path / "cut", max_generations=8, patience=1, min_delta=1e9)
    assert ended.generations == 2
    ended = found(tmp_path / "cut", max_generations=8, max_runtime_s=1e-6)
    assert ended.generations == 2, "its time is over already"
    again = found(tmp_path / "cut", max_generations=8)
    assert (again.generations, again.digest, again.ended) == (8, whole.digest, whole.ended)


def test_a_too_small_improvement_does_not_count() -> None:
    options = {"max_generations": 30, "patience": 2, "population_size": 20}
    assert found(None, min_delta=1e9, **options).generations == 3
    assert found(None, min_delta=1e-9, **options).generations > 5


@pytest.mark.parametrize("direction", ["min", "max"])
def test_when_its_target_is_reached_it_ends(direction: str) -> None:
    sign = 1 if direction == "min" else -1
    problem = Problem(
        GENOME, (Objective("cost", direction),), VectorizedEvaluator(lambda designs: sign * cost(designs))
    )
    result = found(None, problem, max_generations=100, population_size=20, target=sign * 5.0)
    assert 1 < result.generations < 100
    assert result.ended == f"cost has reached {sign * 5}"
    assert result.best is not None
    assert sign * result.best.values["cost"] <= 5.0


def test_when_its_time_is_over_it_returns_the_best_so_far() -> None:
    result = found(None, max_generations=1000, max_runtime_s=0.05)
    assert 0 < result.generations < 1000
    assert "time limit" in result.ended


def test_time_counts_over_attempts(tmp_path: Path) -> None:
    found(tmp_path, max_generations=2, max_runtime_s=3600)
    again = search(tmp_path, max_generations=50, max_runtime_s=3600)
    again._clock.load_state_dict = lambda state: setattr(again._clock, "_before_s", state["elapsed_s"] + 3600)
    result = again.run_complete_pipeline()
    assert (result.generations, result.ended) == (2, "the time limit of 1 h is reached")


def test_a_finished_search_continues_with_more_generations(tmp_path: Path) -> None:
    whole = found(tmp_path / "whole", max_generations=6)
    assert found(tmp_path / "cut", max_generations=3).generations == 3
    assert found(tmp_path / "cut", max_generations=6).digest == whole.digest


def test_all_evaluations_may_fail(tmp_path: Path) -> None:
    def broken(design: dict[str, Any]) -> float:
        raise ValueError("always")

    result = found(tmp_path, Problem(GENOME, (Objective("cost"),), ScalarEvaluator(broken)))
    assert result.best is None
    assert result.failures == result.evaluations == 24
    (event, *_) = (event for event in read_jsonl(tmp_path / "events.jsonl") if "generation" in event)
    assert event["reasons"] == {"ValueError: always": 6}


def test_an_evaluation_that_exits_is_an_error_not_the_end_of_the_search() -> None:
    problem = Problem(GENOME, (Objective("cost"),), ScalarEvaluator(lambda _: sys.exit(0)))
    with pytest.raises(RuntimeError, match=r"called sys.exit\(0\)"):
        found(None, problem)


@pytest.mark.parametrize("damaged", ["[[1.0]]", "[[1.0], [2.0], [3.0], [NaN]]", "[[1.0], [2.0], [3.0], [4.0, 5.0]]"])
def test_an_evaluation_with_a_damaged_record_is_made_again(tmp_path: Path, damaged: str) -> None:
    whole = found(tmp_path / "whole", max_generations=1)
    cut = search(tmp_path / "cut", max_generations=1)
    cut.on_end = lambda: sys.exit(1)
    with pytest.raises(SystemExit):
        cut.run_complete_pipeline()
    records = tmp_path / "cut" / "evaluations" / "0.jsonl"
    first, second = records.read_text().splitlines()
    values = json.dumps(json.loads(first)["evaluations"])
    records.write_text(f"{first.replace(values, damaged)}\n{second}\n")
    assert found(tmp_path / "cut", max_generations=1)[:-1] == whole[:-1]
    assert len(records.read_text().splitlines()) == 3


def test_a_given_design_is_evaluated_first() -> None:
    base = {"x0": 0.25, "x1": 0.0, "x2": 0.0, "x3": 0.0}
    result = search(None, max_generations=1).run_complete_pipeline(base)
    assert result.best is not None
    assert result.best.design == base


class Halving:
    """A custom strategy: always half of the best so far."""

    def __init__(self) -> None:
        self.best = torch.full((1, 4), 4.0, dtype=torch.float64)
        self.population, self.costs = self.best, torch.full((1, 1), torch.inf, dtype=torch.float64)

    def ask(self, count: int, generation: int) -> Tensor:
        return self.best.repeat(count, 1) * torch.linspace(0.5, 0.9, count, dtype=torch.float64)[:, None]

    def tell(self, designs: Tensor, costs: Tensor) -> None:
        self.best = designs[costs[:, 0].argmin()][None]

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best = state["best"]


def test_a_custom_strategy_is_asked_told_and_saved(tmp_path: Path) -> None:
    result = found(tmp_path / "whole", strategy=Halving(), max_generations=5)
    assert result.best is not None
    assert result.best.values["cost"] == 4 * (4 / 2**5) ** 2
    found(tmp_path / "cut", strategy=Halving(), max_generations=2)
    with pytest.raises(UserError, match="strategy: Halving → Evolution"):
        found(tmp_path / "cut", max_generations=5)
    assert found(tmp_path / "cut", strategy=Halving(), max_generations=5).digest == result.digest


class Empty(Halving):
    def __len__(self) -> int:
        return 0


def test_an_empty_strategy_is_used_too() -> None:
    assert isinstance(search(None, strategy=Empty()).strategy, Empty)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda designs: designs[1:],
            r"Wrong.ask\(6, 2\): expected a tensor of shape \(6, 4\), got one of shape \(5, 4\)",
        ),
        (lambda designs: designs[:0], r"got one of shape \(0, 4\)"),
        (lambda designs: designs.tolist(), "got list"),
        (lambda designs: designs + torch.tensor([0, 9.0, 0, 9.0]), r"Wrong.ask\(6, 2\): x1, x3 out of bounds"),
        (lambda designs: designs * torch.tensor([1, 1, torch.nan, 1]), "x2 out of bounds"),
    ],
)
def test_a_strategy_that_returns_wrong_designs_is_refused(change: Callable[[Tensor], Any], message: str) -> None:
    class Wrong(Halving):
        def ask(self, count: int, generation: int) -> Tensor:
            designs = super().ask(count, generation)
            answer: Tensor = change(designs) if generation == 2 else designs
            return answer

    with pytest.raises(UserError, match=message):
        found(None, strategy=Wrong())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"population_size": 0}, "population_size=0: expected a whole number greater than 0"),
        ({"max_generations": 1.5}, "max_generations=1.5"),
        ({"max_runtime_s": -1}, "max_runtime_s=-1"),
        ({"patience": 0}, "patience=0"),
        ({"min_delta": -0.1}, "min_delta=-0.1: expected a number of 0 or more"),
        ({"min_delta": float("nan")}, "min_delta=nan"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SearchSettings(**options)
