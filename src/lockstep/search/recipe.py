"""What a search recipe is: a problem, with a config of its own."""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from lockstep.config.search import SearchConfig
from lockstep.errors import UserError
from lockstep.search.problem import Problem


class SearchRecipe(Protocol):
    """Subclassing is optional: any object with these will do. It may also have:

    `base(config)`: the design to begin with, by its genes' names; and `conclude(search, config)`, called on every rank
    after the last generation, before the run's end: to draw pictures, for example.
    """

    config_class: ClassVar[type[SearchConfig]]

    def problem(self, config: Any) -> Problem: ...


def base_of(recipe: SearchRecipe, config: SearchConfig) -> Mapping[str, Any] | None:
    make_base = getattr(recipe, "base", None)
    base = None if make_base is None else make_base(config)
    if not (base is None or isinstance(base, Mapping)):
        raise UserError(f"{config.recipe}: expected a design by its genes' names from its base(config), got {base!r}")
    return base
