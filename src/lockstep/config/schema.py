"""The schema of a training config.

A user's own is a subclass:

    class MyConfig(lockstep.Config):
        width: Count = 64

    config = MyConfig.from_file("run.yaml", ["optim.lr=1e-3"])
"""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from lockstep.config.duration import Duration
from lockstep.config.fields import (
    Count,
    DurationField,
    Flag,
    FreeForm,
    Frozen,
    Lanes,
    NonNegative,
    Positive,
    Section,
    Whole,
    require_time,
)
from lockstep.config.job import JobConfig
from lockstep.config.strategies import (
    ActivationCheckpointingConfig,
    CompressionConfig,
    CompressionField,
    FsdpConfig,
    MeshConfig,
)


def _require_one(value: int | None, info: ValidationInfo, other: str, names: str) -> int | None:
    """Exactly one of two fields is given. A field's validator, not the model's: it runs beside other faults."""
    if other in info.data and (value is None) == (info.data[other] is None):
        raise PydanticCustomError("exactly_one", "give exactly one of {names}", {"names": names})
    return value


class BatchConfig(Frozen):
    """The batch of a step, said in one of two ways."""

    # Not `alias`: a type checker would then want the keyword argument `global`, which Python cannot write.
    global_batch: Count | None = Field(default=None, validation_alias="global", serialization_alias="global")
    per_device: Count | None = Field(default=None, validate_default=True)

    @field_validator("per_device")
    @classmethod
    def _one_size(cls, value: int | None, info: ValidationInfo) -> int | None:
        return _require_one(value, info, "global_batch", "global and per_device")


class GroupConfig(Frozen):
    """What some of the parameters have of their own; of several that match, the first counts."""

    match: str  # the parameter's name, as file names match *.txt
    lr_factor: NonNegative = 1.0
    weight_decay: NonNegative | None = None  # the optimizer's


_Beta = Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)]


class OptimConfig(Frozen):
    name: Literal["sgd", "adam", "adamw"] = "adamw"
    lr: Positive = 1e-3
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"  # of lr, with the global batch over base_batch
    base_batch: Count | None = Field(default=None, validate_default=True)  # that lr was found at
    weight_decay: NonNegative = 0.0
    momentum: NonNegative = 0.9  # sgd only
    nesterov: Flag = False  # sgd only
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)  # adam and adamw only
    eps: NonNegative = 1e-8  # adam and adamw only
    groups: tuple[GroupConfig, ...] = ()

    @field_validator("base_batch")
    @classmethod
    def _known_base(cls, value: int | None, info: ValidationInfo) -> int | None:
        rule = info.data.get("lr_scaling", "none")
        if value is None and rule != "none":
            raise PydanticCustomError(
                "base_batch", "lr_scaling {rule} needs the global batch that lr was found at", {"rule": rule}
            )
        return value

    @field_validator("nesterov")
    @classmethod
    def _momentum_to_look_ahead(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("momentum") == 0:
            raise PydanticCustomError("nesterov", "needs a momentum greater than 0")
        return value


class ScheduleConfig(Frozen):
    """How the learning rate moves over the run."""

    kind: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup: DurationField = Duration.parse(0)  # update n of w gets n/w of the rate
    length: DurationField | None = None  # linear and cosine: warm-up included; to the run's end if left out
    final: NonNegative = 0.0  # linear and cosine: the part of the rate that is left then
    every: DurationField | None = Field(default=None, validate_default=True)  # step: after each such stretch, times
    factor: Annotated[Positive, Field(le=1)] = 0.1  # this

    @field_validator("length", "every")
    @classmethod
    def _takes_time(cls, value: Duration | None) -> Duration | None:
        return None if value is None else require_time(value)

    @field_validator("every")
    @classmethod
    def _known_stretch(cls, value: Duration | None, info: ValidationInfo) -> Duration | None:
        if value is None and info.data.get("kind") == "step":
            raise PydanticCustomError("every", "kind step needs a duration, as in 30 epochs")
        return value


class AverageConfig(Frozen):
    """An exponential moving average of the weights, which is then what is evaluated."""

    decay: Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)] = 0.999
    warmup: Flag = True  # begins with less, so that the first weights fade quickly


class GoalConfig(Frozen):
    """A metric, and which way is better."""

    metric: str
    mode: Literal["min", "max"]


class EarlyStoppingConfig(GoalConfig):
    patience: Count = 5  # evaluations without an improvement
    min_delta: NonNegative = 0.0  # less than this is none


class CheckpointConfig(Frozen):
    """When to save besides the end, and what stays; the best model does in any case."""

    every: DurationField = Duration.parse("200 steps")
    keep: Count = 3  # the newest
    keep_every: Count | None = None  # and those of every so-many-th step
    memory: Flag = True  # also keep the newest state in memory, where an agent may restart the run

    @field_validator("every")
    @classmethod
    def _comes_at_last(cls, value: Duration) -> Duration:
        return require_time(value)


class Config(JobConfig):
    """A training run. Recipes and users subclass it, and narrow `model` and `data` to Frozen classes of their own."""

    free_on_resume: ClassVar[frozenset[str]] = JobConfig.free_on_resume | {
        "activation_checkpointing",
        "bucket_mb",
        "checkpoint",
        "find_unused_parameters",
        "fsdp",
        "lanes_per_rank",
        "parallel",
        "tensor_plan",
        "workers",
    }

    epochs: Count | None = None  # or steps
    steps: Count | None = Field(default=None, validate_default=True)
    batch: BatchConfig
    lanes: Lanes = "auto"  # parts of a batch: part of the numerics, and the most processes that can share the work
    accumulate: Count | None = None  # with batch.per_device: passes per process and update, in place of lanes
    lanes_per_rank: tuple[Count, ...] | None = None  # for unequal devices; changes no bit
    tail: Literal["drop", "short", "pad"] = "drop"  # what becomes of an epoch's last, incomplete batch
    workers: Whole = 0  # processes per rank that fetch samples; changes no bit
    evaluation_batch: Count = 256  # samples at a time
    evaluate_every: DurationField = Duration.parse("1 epoch")
    best: GoalConfig | None = None  # keep a checkpoint of the best model by this metric
    early_stopping: EarlyStoppingConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    determinism: Literal["lockstep", "fast"] = "lockstep"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # bf16 and fp16: autocast; fp16 scales the loss too
    tf32: Flag = False  # in fp32 products on a GPU
    on_nonfinite: Literal["stop", "skip", "ignore"] = "stop"  # when the loss or a gradient is NaN or infinite
    buffers: dict[str, Literal["mean", "first", "max"]] = Field(default_factory=dict)  # by name pattern
    clip_norm: Positive | None = None
    bucket_mb: Positive = 4.0  # of gradients that travel together; changes no bit
    compression: CompressionField = CompressionConfig()  # how gradients travel; fast mode only
    parallel: Literal["auto", "single", "dp", "ddp", "zero", "fsdp"] | MeshConfig = "auto"  # over processes
    fsdp: FsdpConfig = FsdpConfig()
    tensor_plan: dict[str, str] = Field(default_factory=dict)  # by module name pattern: column, row, sequence …
    find_unused_parameters: Flag = False  # fast mode only; lockstep mode needs no telling
    activation_checkpointing: ActivationCheckpointingConfig | None = None  # less memory for more time
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    average: AverageConfig | None = None
    use_ddp: Flag = True  # false: parallel=dp
    model: FreeForm = Section()
    data: FreeForm = Section()

    @field_validator("accumulate")
    @classmethod
    def _says_something(cls, value: int | None, info: ValidationInfo) -> int | None:
        batch = info.data.get("batch")
        if value is not None and batch is not None and batch.per_device is None:
            raise PydanticCustomError("accumulate", "goes with batch.per_device; with batch.global, lanes says it")
        return value

    @field_validator("evaluate_every")
    @classmethod
    def _comes_at_last(cls, value: Duration) -> Duration:
        return require_time(value)

    @field_validator("steps")
    @classmethod
    def _one_length(cls, value: int | None, info: ValidationInfo) -> int | None:
        return _require_one(value, info, "epochs", "epochs and steps")
