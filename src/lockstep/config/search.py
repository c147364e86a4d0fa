"""The schema of a search's config. A recipe's own is a subclass, with sections of its own."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from lockstep.config.fields import Count, Frozen, NonNegative, Positive, PowerOfTwo, Whole, read_whole
from lockstep.config.job import JobConfig

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1, strict=True, allow_inf_nan=False)]
_Part = Annotated[float, Field(gt=0, le=1, strict=True, allow_inf_nan=False)]
_Several = Annotated[int, Field(ge=2), BeforeValidator(read_whole)]
_Memory = Annotated[int, Field(ge=8), BeforeValidator(read_whole)]  # with less there is nothing to learn from


class EvolutionConfig(Frozen):
    """How designs breed."""

    elites: Whole | None = None  # parents that may stay if none better come; all, if left out
    tournament_size: Count = 2  # the best of so many becomes a parent: the more, the greedier
    crossover_rate: _Share = 0.9  # of children that have two parents
    blend_rate: _Share = 0.3  # of groups that are not quite a parent's but between or beyond the two
    mutation_rate: _Share | None = None  # of genes that mutate; if left out, one of them on average
    mutation_strength: _Part = 0.1  # deviation of wide steps, as a share of a gene's range; of narrow ones the most
    strength_floor: _Part = 1e-6  # of narrow ones the least

    @field_validator("strength_floor")
    @classmethod
    def _is_under_the_most(cls, value: float, info: ValidationInfo) -> float:
        most = info.data.get("mutation_strength", 1.0)
        if value > most:
            raise PydanticCustomError(
                "strength_floor", "expected no more than mutation_strength, {most}", {"most": most}
            )
        return value


class StageConfig(Frozen):
    """What holds from a generation on: how much the losses of value and policy weigh, and how much is guided."""

    generation: Whole = 0
    value: NonNegative = 1.0
    policy: NonNegative = 1.0
    guided_share: _Share | None = None  # the network's, if left out


class NetworkConfig(Frozen):
    """The network that is trained alongside, and steers."""

    train_every: Count = 1  # generations
    steps: Count = 60  # updates of a training
    lanes: PowerOfTwo = 4  # the most processes that share its training; with more, each trains it by itself
    global_batch: Count = 128  # lessons of an update
    lr: Positive = 6e-3  # a training begins with it, and ends with a tenth
    members: Count = 4  # networks side by side, whose mean counts
    width: Count = 64  # of their layers
    depth: Count = 2  # how many of these
    memory: _Memory = 256  # it learns from so many designs: the best of the latest
    guided_share: _Share = 0.5  # of the offspring; the others are as evolution has bred them
    candidates: _Several = 16  # screened for each guided place
    reach: Positive = 2.0  # how far from a design it may propose others, in deviations of the remembered ones
    curriculum: tuple[StageConfig, ...] = ()

    @field_validator("global_batch")
    @classmethod
    def _can_be_cut(cls, value: int, info: ValidationInfo) -> int:
        lanes = info.data.get("lanes", 1)
        if value % lanes:
            raise PydanticCustomError("global_batch", "expected a multiple of lanes, {lanes}", {"lanes": lanes})
        return value

    @field_validator("curriculum")
    @classmethod
    def _in_order(cls, value: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
        begins = [stage.generation for stage in value]
        if begins != sorted(set(begins)):
            raise PydanticCustomError("curriculum", "expected each stage to begin after the one before")
        return value


class SearchStoppingConfig(Frozen):
    """Ends before `max_generations`, whichever comes first."""

    patience: Count | None = None  # generations without an improvement
    min_delta: NonNegative = 0.0  # less than this is none
    target: _Number | None = Field(default=None, validate_default=True)  # of the first objective

    @field_validator("target")
    @classmethod
    def _says_something(cls, value: float | None, info: ValidationInfo) -> float | None:
        if value is None and info.data.get("patience", 1) is None:
            raise PydanticCustomError("early_stopping", "give patience, target, or both")
        return value


class SearchConfig(JobConfig):
    """A search. Recipes and users subclass it."""

    free_on_resume: ClassVar[frozenset[str]] = JobConfig.free_on_resume | {
        "early_stopping",
        "keep_checkpoints",
        "max_generations",
        "max_runtime_hours",
        "save_frequency",
    }

    max_generations: Count = 50
    population_size: Count = 64  # designs a generation, over all processes
    save_frequency: Count = 1  # generations between two checkpoints; finished evaluations are kept in any case
    keep_checkpoints: Count = 3  # the newest
    max_runtime_hours: Positive | None = None  # over all attempts; then it ends with what it has
    early_stopping: SearchStoppingConfig | None = None
    evolution: EvolutionConfig = EvolutionConfig()
    network: NetworkConfig | None = NetworkConfig()  # null: evolution alone
