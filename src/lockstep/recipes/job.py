"""Carrying a recipe out, whichever kind it is of."""

from typing import Any

from lockstep.config.job import JobConfig
from lockstep.config.search import SearchConfig


def carry_out(recipe: Any, config: JobConfig, *place: Any, **options: Any) -> None:
    """Train it, or search; `place` and `options` as `train_recipe` and `search_recipe` have them."""
    if isinstance(config, SearchConfig):
        from lockstep.search.job import search_recipe

        search_recipe(recipe, config, *place, **options)
    else:
        from lockstep.train.job import train_recipe

        train_recipe(recipe, config, *place, **options)  # type: ignore[arg-type]
