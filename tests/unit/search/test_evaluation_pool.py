"""An evaluation that changes global state: the next one, and the run, find it restored."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.search.evaluators import ScalarEvaluator
from lockstep.search.genome import FloatGene, Genome
from lockstep.search.problem import Objective, Problem
from lockstep.search.search_loop import Search, SearchSettings
from lockstep.train.run import Run
from lockstep.world.world import World

CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "default dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "determinism": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(not torch.are_deterministic_algorithms_enabled()),
    ),
    "folder": (Path.cwd, lambda: os.chdir("/")),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("fails", [False, True])
def test_every_evaluation_starts_from_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, fails: bool
) -> None:
    look, change = CHANGES[what]
    seen = []

    def cost(design: dict[str, Any]) -> float:
        seen.append(look())
        change()
        if fails:
            raise ValueError("and leaves it so")
        return float(design["x"])

    monkeypatch.chdir(tmp_path)
    problem = Problem(Genome([FloatGene("x", 0, 1)]), (Objective("cost"),), ScalarEvaluator(cost))
    run = Run("runs/a", World(), seed=1, sinks=[])
    before = look()
    Search(run, problem, SearchSettings(population_size=3, max_generations=2, network=None)).run_complete_pipeline()
    assert {*seen, look()} == {before}
    assert len(list(Path("runs/a/evaluations").iterdir())) == 1


def test_a_search_runs_even_if_its_working_directory_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    problem = Problem(Genome([FloatGene("x", 0, 1)]), (Objective("cost"),), ScalarEvaluator(lambda design: design["x"]))
    run = Run(tmp_path / "run", World(), seed=1, sinks=[])
    settings = SearchSettings(population_size=3, max_generations=2, network=None)
    assert Search(run, problem, settings).run_complete_pipeline().failures == 0
    monkeypatch.chdir(tmp_path)
