"""The recipe protocol: a model, its data, its loss and its metrics, with a config class."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn
from torch.utils.data import Dataset

from lockstep.config.train_schema import Config
from lockstep.data.sample_source import Collate
from lockstep.metrics.aggregator import MetricValue


class Splits(NamedTuple):
    """The data sets of a recipe.

    Args:
        train: the training set.
        test: the test set.
        collate: how samples become a batch; torch's default collate function if omitted.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    collate: Collate | None = None


class Recipe(Protocol):
    """What a recipe must have. Subclassing is optional: any object with these members will do.

    A recipe may also have

    - `callbacks(config)`: the trainer's callbacks, such as a curriculum that is saved and resumed with the run;
    - `conclude(run, model, config)`: called on every rank after training, with the weights that were evaluated, to log
      samples, for example.

    A recipe that is a class is instantiated for each run, `Recipe(config)`, and may keep state of that run.
    """

    config_class: ClassVar[type[Config]]

    def model(self, config: Any) -> nn.Module:
        """Return a new model; randomness is seeded before this is called."""
        ...

    def data(self, config: Any) -> Splits:
        """Return the training set and the test set."""
        ...

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, int]:
        """Return the *sum* of the losses of `model` over the batch, and how many there were."""
        ...

    def metrics(self, model: nn.Module, batch: Any) -> Mapping[str, MetricValue]:
        """Return each metric of `model` over the batch: (sum, count), or one of `lockstep.metrics`. Main one first."""
        ...


def recipe_for_run(config: Config, recipe: Recipe | type[Any]) -> Recipe:
    """Return the recipe for one run: a class is instantiated."""
    if isinstance(recipe, type):
        made: Recipe = recipe(config)
        return made
    return recipe
