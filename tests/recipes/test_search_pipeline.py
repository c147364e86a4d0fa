"""A search started from Python by its config: in this process, and on worker processes."""

import sys
from pathlib import Path

import pytest

from lockstep.errors import ConfigError, UserError
from lockstep.events.jsonl import read_jsonl
from lockstep.recipes.search_pipeline import SearchPipeline
from tests.commands import run

CONFIG = """
recipe: wing
max_generations: 2
population_size: 6
network: null
wing: {panels: 16, pictures: no}
"""

SCRIPT = """
from lockstep.search import SearchPipeline, main_distributed

if __name__ == "__main__":
    main_distributed("wing.yaml", world_size=2)
    alone = SearchPipeline("wing.yaml", rank=-1, world_size=1, folder="runs/alone")
    assert (alone.world.size, alone.world.backend) == (1, None)
    result = alone.run_complete_pipeline({"span": 1.7})
    SearchPipeline.cleanup_distributed()
    print(result.generations, result.evaluations)
"""


def test_it_runs_on_worker_processes_and_in_this_process(tmp_path: Path) -> None:
    (tmp_path / "wing.yaml").write_text(CONFIG)
    (tmp_path / "script.py").write_text(SCRIPT)
    finished = run([sys.executable, "script.py"], tmp_path)
    assert finished.code == 0, finished.err
    assert finished.out.splitlines()[-1] == "2 12"
    (start, *_) = read_jsonl(tmp_path / "runs" / "wing" / "events.jsonl")
    assert start["processes"] == 2


def test_the_base_design_is_in_the_first_generation(tmp_path: Path) -> None:
    (tmp_path / "wing.yaml").write_text(CONFIG)
    pipeline = SearchPipeline(tmp_path / "wing.yaml", -1, 1, overrides=["max_generations=1"], folder=tmp_path / "run")
    with pytest.raises(UserError, match=r"gene span: expected a number from .* m, got 99"):
        pipeline.run_complete_pipeline({"span": 99})
    with pytest.raises(UserError, match="the genome has no gene spam; did you mean span"):
        pipeline.run_complete_pipeline({"spam": 1.7})


def test_a_training_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="digits is trained, not searched"):
        SearchPipeline("digits", -1, 1)
    (tmp_path / "wing.yaml").write_text(CONFIG + "max_generation: 3\n")
    with pytest.raises(ConfigError, match="max_generation: unknown key; did you mean max_generations"):
        SearchPipeline(tmp_path / "wing.yaml", -1, 1)
