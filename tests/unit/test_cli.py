"""What the command does before the processes of a job connect."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.config.environment import variable
from lockstep.recipes import search_pipeline
from lockstep.recipes.registry import load_recipe
from lockstep.world import process_group


def train(overrides: list[str]) -> None:
    recipe, settings = load_recipe("digits", overrides)
    cli._train_here(recipe, settings, Path("run"), "auto", None, True, False)


def search(overrides: list[str]) -> None:
    search_pipeline.SearchPipeline("wing", -1, 1, overrides=overrides)


@pytest.mark.parametrize("begin", [train, search])
@pytest.mark.parametrize(("overrides", "heard"), [([], "VERSION"), (["nccl_debug=INFO"], "INFO")])
def test_nccl_gets_the_configs_debug_level_before_the_processes_connect(
    monkeypatch: pytest.MonkeyPatch, begin: Callable[[list[str]], None], overrides: list[str], heard: str
) -> None:
    class Met(Exception):
        pass

    def meet(*_: Any, **__: Any) -> None:
        raise Met(variable("NCCL_DEBUG"))

    monkeypatch.setenv("NCCL_DEBUG", "VERSION")
    for module in (process_group, search_pipeline):
        monkeypatch.setattr(module, "setup_distributed", meet)
    with pytest.raises(Met, match=heard):
        begin(overrides)
