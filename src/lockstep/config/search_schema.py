"""Config keys of a search: `lockstep.search.SearchConfig` and its sections. Recipes and users subclass it."""

from typing import Annotated, ClassVar

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from lockstep.config.field_types import Frozen, NonNegative, Positive, PositiveInt, PowerOfTwo, Whole, read_whole
from lockstep.config.job_schema import JobConfig

# The comment at the end of a field's line is the field's description in docs/reference/settings.md.

_Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Fraction = Annotated[float, Field(ge=0, le=1, strict=True, allow_inf_nan=False)]
_PositiveFraction = Annotated[float, Field(gt=0, le=1, strict=True, allow_inf_nan=False)]
_TwoOrMore = Annotated[int, Field(ge=2), BeforeValidator(read_whole)]
_EightOrMore = Annotated[int, Field(ge=8), BeforeValidator(read_whole)]


class EvolutionConfig(Frozen):
    """How new designs are bred: selection, crossover, mutation."""

    elites: Whole | None = None  # parents that survive if no child is better; by default all of them
    tournament_size: PositiveInt = 2  # the best of this many designs becomes a parent: larger is greedier
    crossover_rate: _Fraction = 0.9  # fraction of children that have two parents
    blend_rate: _Fraction = 0.3  # fraction of gene groups that are blended from both parents, not copied from one
    mutation_rate: _Fraction | None = None  # fraction of genes that mutate; by default one gene per child on average
    mutation_strength: _PositiveFraction = 0.1  # standard deviation of a mutation, as a fraction of the gene's range
    strength_floor: _PositiveFraction = (
        1e-6  # the minimum to which mutation_strength shrinks as the population converges
    )

    @field_validator("strength_floor")
    @classmethod
    def _require_at_most_strength(cls, value: float, info: ValidationInfo) -> float:
        strength = info.data.get("mutation_strength", 1.0)
        if value > strength:
            raise PydanticCustomError(
                "strength_floor",
                "expected at most mutation_strength ({strength}), got {value}",
                {"strength": strength, "value": value},
            )
        return value


class StageConfig(Frozen):
    """Settings that apply from a generation on: the weights of the value and policy losses, and `guided_share`."""

    generation: Whole = 0
    value: NonNegative = 1.0
    policy: NonNegative = 1.0
    guided_share: _Fraction | None = None  # by default the network's


class NetworkConfig(Frozen):
    """The surrogate network that is trained during the search and proposes designs."""

    train_every: PositiveInt = 1  # generations
    steps: PositiveInt = 60  # updates per training
    lanes: PowerOfTwo = (
        4  # the maximum number of processes that share its training; if there are more, each trains a copy
    )
    global_batch: PositiveInt = 128  # examples per update
    lr: Positive = 6e-3  # at the start of a training; a tenth of it at the end
    members: PositiveInt = 4  # networks in the ensemble, whose predictions are averaged
    width: PositiveInt = 64  # of each layer
    depth: PositiveInt = 2  # number of layers
    memory: _EightOrMore = 256  # designs that it learns from: the best of the most recent ones
    guided_share: _Fraction = 0.5  # fraction of the offspring that the network chooses; evolution alone breeds the rest
    candidates: _TwoOrMore = 16  # screened for each offspring that the network chooses
    reach: Positive = 2.0  # how far from a design it may propose others, in standard deviations of those in memory
    curriculum: tuple[StageConfig, ...] = ()  # in order of generation

    @field_validator("global_batch")
    @classmethod
    def _require_whole_lanes(cls, value: int, info: ValidationInfo) -> int:
        lanes = info.data.get("lanes", 1)
        if value % lanes:
            raise PydanticCustomError(
                "global_batch",
                "expected a multiple of lanes ({lanes}), got {value}",
                {"lanes": lanes, "value": value},
            )
        return value

    @field_validator("curriculum")
    @classmethod
    def _require_order(cls, value: tuple[StageConfig, ...]) -> tuple[StageConfig, ...]:
        generations = [stage.generation for stage in value]
        if generations != sorted(set(generations)):
            raise PydanticCustomError(
                "curriculum",
                "expected each stage to start after the previous one, got generations {generations}",
                {"generations": ", ".join(map(str, generations))},
            )
        return value


class SearchStoppingConfig(Frozen):
    """Stop before `max_generations`; if both conditions are given, the first that is met stops the search."""

    patience: PositiveInt | None = None  # generations without an improvement
    min_delta: NonNegative = 0.0  # smaller changes do not count as an improvement
    target: _Number | None = Field(default=None, validate_default=True)  # of the first objective

    @field_validator("target")
    @classmethod
    def _require_condition(cls, value: float | None, info: ValidationInfo) -> float | None:
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

    max_generations: PositiveInt = 50
    population_size: PositiveInt = 64  # designs per generation, over all processes
    save_frequency: PositiveInt = 1  # generations between checkpoints; finished evaluations are always kept
    keep_checkpoints: PositiveInt = 3  # the newest ones
    max_runtime_hours: Positive | None = None  # over all attempts; the search then ends with the best found so far
    early_stopping: SearchStoppingConfig | None = None
    evolution: EvolutionConfig = EvolutionConfig()
    network: NetworkConfig | None = NetworkConfig()  # null: evolution alone
