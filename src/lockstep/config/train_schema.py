"""Config keys of a training run: `lockstep.Config` and its sections.

To add keys, subclass it:

    class MyConfig(lockstep.Config):
        width: PositiveInt = 64

    config = MyConfig.from_file("run.yaml", ["optim.lr=1e-3"])
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from lockstep.config.duration import Duration
from lockstep.config.field_types import (
    ConfigSection,
    DurationField,
    Flag,
    FreeForm,
    Frozen,
    LaneCount,
    NonNegative,
    Positive,
    PositiveInt,
    WorkerCount,
    require_time,
)
from lockstep.config.job_schema import JobConfig
from lockstep.config.optimizer_settings import DEFAULT_OPTIMIZER, OWN_SETTINGS, owners_of, read_optimizer_name

# The comment at the end of a field's line is the field's description in docs/reference/settings.md.

_Fraction = Annotated[float, Field(ge=0, lt=1, strict=True, allow_inf_nan=False)]


def _require_one(value: int | None, info: ValidationInfo, other: str, names: str) -> int | None:
    """Require exactly one of two fields. A field's validator, because a model's does not run if any field is wrong."""
    if other in info.data and (value is None) == (info.data[other] is None):
        raise PydanticCustomError("exactly_one", "give exactly one of {names}", {"names": names})
    return value


class BatchConfig(Frozen):
    """The batch size of a step: over all processes (`global`) or per process (`per_device`)."""

    # Not `alias`: a type checker would then want the keyword argument `global`, which Python cannot write.
    global_batch: PositiveInt | None = Field(default=None, validation_alias="global", serialization_alias="global")
    per_device: PositiveInt | None = Field(default=None, validate_default=True)  # samples per step and process

    @field_validator("per_device")
    @classmethod
    def _require_one_size(cls, value: int | None, info: ValidationInfo) -> int | None:
        return _require_one(value, info, "global_batch", "global and per_device")


class GroupConfig(Frozen):
    """Optimizer settings for the parameters whose names match; if several groups match, the first applies."""

    match: str  # a pattern for parameter names, with wildcards as for file names: *.bias
    lr_factor: NonNegative = 1.0  # multiplies the learning rate
    weight_decay: NonNegative | None = None  # by default the optimizer's


class OptimConfig(Frozen):
    """The optimizer and its learning rate."""

    name: str = DEFAULT_OPTIMIZER  # sgd, adam, adamw, another class of torch.optim, or package.module:Class
    lr: Positive = 1e-3
    lr_scaling: Literal["none", "linear", "sqrt"] = "none"  # scale lr by global batch / base_batch, or its square root
    base_batch: PositiveInt | None = Field(default=None, validate_default=True)  # the global batch lr was tuned for
    weight_decay: NonNegative = 0.0
    momentum: NonNegative = 0.9  # sgd only
    nesterov: Flag = False  # sgd only
    betas: tuple[_Fraction, _Fraction] = (0.9, 0.999)  # adam and adamw only
    eps: NonNegative = 1e-8  # adam and adamw only
    arguments: FreeForm = ConfigSection()  # what else the optimizer's constructor takes, by name
    groups: tuple[GroupConfig, ...] = ()  # settings for some of the parameters

    @field_validator("name")
    @classmethod
    def _require_name(cls, value: str) -> str:
        # Only the form is checked here, so that reading a config imports neither torch nor what the name refers to.
        name = read_optimizer_name(value)
        if name is None:
            raise PydanticCustomError(
                "optimizer_name",
                "expected {known}, a class of torch.optim, or package.module:Class, got {value}",
                {"known": ", ".join(OWN_SETTINGS), "value": repr(value[:60])},
            )
        return name

    @field_validator("momentum", "nesterov", "betas", "eps")
    @classmethod
    def _require_owner(cls, value: Any, info: ValidationInfo) -> Any:
        name = info.data.get("name")
        if name is not None and name not in OWN_SETTINGS:
            raise PydanticCustomError(
                "optimizer_setting",
                "only for {owners}: for {name}, write optim.arguments.{setting}",
                {"owners": owners_of(str(info.field_name)), "name": name, "setting": info.field_name},
            )
        return value

    @model_serializer(mode="wrap")
    def _omit_settings_of_others(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the settings that `_require_owner` would refuse when the values are read back."""
        values: dict[str, Any] = serialize(self)
        if self.name in OWN_SETTINGS:
            return values
        others = {setting for settings in OWN_SETTINGS.values() for setting in settings}
        return {name: value for name, value in values.items() if name not in others}

    @field_validator("base_batch")
    @classmethod
    def _require_base_batch(cls, value: int | None, info: ValidationInfo) -> int | None:
        rule = info.data.get("lr_scaling", "none")
        if value is None and rule != "none":
            raise PydanticCustomError(
                "base_batch", "lr_scaling: {rule} needs the global batch that lr was tuned for", {"rule": rule}
            )
        return value

    @field_validator("nesterov")
    @classmethod
    def _require_momentum(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("momentum") == 0:
            raise PydanticCustomError("nesterov", "needs a momentum greater than 0")
        return value


class ScheduleConfig(Frozen):
    """How the learning rate changes over the run."""

    kind: Literal["constant", "linear", "cosine", "step"] = "constant"
    warmup: DurationField = Duration.parse(0)  # update n of w gets n/w of the rate
    length: DurationField | None = None  # linear and cosine: warm-up included; by default the whole run
    final: NonNegative = 0.0  # linear and cosine: the rate at the end, as a fraction of lr
    every: DurationField | None = Field(default=None, validate_default=True)  # step: how often the rate drops
    factor: Annotated[Positive, Field(le=1)] = 0.1  # step: the rate is multiplied by this at each drop

    @field_validator("length", "every")
    @classmethod
    def _require_time(cls, value: Duration | None) -> Duration | None:
        return None if value is None else require_time(value)

    @field_validator("every")
    @classmethod
    def _require_interval(cls, value: Duration | None, info: ValidationInfo) -> Duration | None:
        if value is None and info.data.get("kind") == "step":
            raise PydanticCustomError("every", "kind: step needs a duration, as in 30 epochs")
        return value


class AverageConfig(Frozen):
    """An exponential moving average of the weights, which evaluation then uses."""

    decay: _Fraction = 0.999
    warmup: Flag = True  # start with a smaller decay, so that the initial weights fade quickly


class GoalConfig(Frozen):
    """A metric, and whether lower or higher is better."""

    metric: str
    mode: Literal["min", "max"]


class EarlyStoppingConfig(GoalConfig):
    """Stop when the metric no longer improves."""

    patience: PositiveInt = 5  # evaluations without an improvement
    min_delta: NonNegative = 0.0  # smaller changes do not count as an improvement


class CheckpointConfig(Frozen):
    """When to save, besides at the end, and which checkpoints to keep; the best one is always kept."""

    every: DurationField = Duration.parse("200 steps")
    keep: PositiveInt = 3  # the newest ones
    keep_every: PositiveInt | None = None  # also keep those whose step is a multiple of this
    memory: Flag = True  # also keep the newest state in memory, where an agent may restart the run

    @field_validator("every")
    @classmethod
    def _require_time(cls, value: Duration) -> Duration:
        return require_time(value)


class MeshConfig(Frozen):
    """The number of processes along each axis of a mesh; if one of data and shard is omitted, it takes the rest."""

    data: PositiveInt | None = None  # replicas of the model
    shard: PositiveInt | None = None  # processes that each parameter is sharded over
    tensor: PositiveInt | None = None  # processes that single layers are split over, as tensor_plan says


class FsdpConfig(Frozen):
    """How `parallel: fsdp`, or a mesh, shards a model."""

    wrap: tuple[str, ...] = ()  # names of module classes to shard as units; by default units are chosen by size
    min_parameters: Positive = 1e6  # modules with at least this many are units, if wrap is empty
    cpu_offload: Flag = False  # keep parameters in host memory while they are not in use
    reshard_after_forward: Flag = True  # false: gather once per step instead of twice, at the cost of memory


def _read_compression(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class CompressionConfig(Frozen):
    """How gradients are compressed for all-reduce, in fast mode; keys other than `kind` are for PowerSGD."""

    kind: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    rank: PositiveInt = 1  # of the low-rank approximation
    start_after: DurationField = Duration.parse("10 steps")  # until then gradients are not compressed
    min_compression_rate: Positive = 2.0  # a gradient that would shrink by less is not compressed
    warm_start: Flag = True  # start from the previous approximation
    error_feedback: Flag = True  # add the approximation's error to the next gradient

    @field_validator("rank", "start_after", "min_compression_rate", "warm_start", "error_feedback")
    @classmethod
    def _require_powersgd(cls, value: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("kind", "powersgd")
        if kind != "powersgd" and value != cls.model_fields[str(info.field_name)].default:
            raise PydanticCustomError("powersgd", "only valid with kind: powersgd, got kind: {kind}", {"kind": kind})
        return value


CompressionField = Annotated[CompressionConfig, BeforeValidator(_read_compression)]
"""The name of a kind, or a mapping with its settings."""


class ActivationCheckpointingConfig(Frozen):
    """Modules whose activations are recomputed in the backward pass; changes no bit of the result."""

    every: PositiveInt = 1  # recompute every n-th of these modules
    classes: tuple[str, ...] = ()  # names of module classes; by default the model's repeated blocks


class Config(JobConfig):
    """The settings of a training run: what a YAML file and `key=value` overrides are checked against.

    Example:
        config = lockstep.Config.from_file("run.yaml", ["optim.lr=1e-3"])
        print(config.optim.lr)

    Each key with its default is on the page Settings of the guide. To add keys, subclass it; recipes narrow `model` and
    `data` in the same way.
    """

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

    epochs: PositiveInt | None = None  # or steps
    steps: PositiveInt | None = Field(default=None, validate_default=True)  # or epochs
    batch: BatchConfig
    lanes: LaneCount = "auto"  # slices of a batch: part of the numerics, and the maximum number of processes
    accumulate: PositiveInt | None = None  # with batch.per_device: passes per process and update, in place of lanes
    lanes_per_rank: tuple[PositiveInt, ...] | None = None  # for unequal devices; changes no bit
    tail: Literal["drop", "short", "pad"] = "drop"  # how an epoch's last, incomplete batch is handled
    workers: WorkerCount = 0  # processes per rank that load samples; changes no bit
    evaluation_batch: PositiveInt = 256  # samples at a time
    evaluate_every: DurationField = Duration.parse("1 epoch")
    best: GoalConfig | None = None  # keep a checkpoint of the best model by this metric
    early_stopping: EarlyStoppingConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    determinism: Literal["lockstep", "fast"] = "lockstep"  # fast: stock DDP and FSDP, and the fastest kernels
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"  # bf16 and fp16: autocast; fp16 also scales the loss
    tf32: Flag = False  # for fp32 matrix products on a GPU
    on_nonfinite: Literal["stop", "skip", "ignore"] = "stop"  # if the loss or a gradient is NaN or infinite
    buffers: dict[str, Literal["mean", "first", "max"]] = Field(default_factory=dict)  # by name pattern
    clip_norm: Positive | None = None  # gradients with a larger norm are scaled down to it
    bucket_mb: Positive = 4.0  # of gradients that are reduced together; changes no bit
    compression: CompressionField = CompressionConfig()  # of gradients; fast mode only
    parallel: Literal["auto", "single", "dp", "ddp", "zero", "fsdp"] | MeshConfig = "auto"  # strategy, or mesh
    fsdp: FsdpConfig = FsdpConfig()
    tensor_plan: dict[str, str] = Field(default_factory=dict)  # by module name pattern: column, row, sequence …
    find_unused_parameters: Flag = False  # fast mode only; lockstep mode does not need it
    activation_checkpointing: ActivationCheckpointingConfig | None = None  # less memory for more time
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    average: AverageConfig | None = None  # an exponential moving average of the weights, used for evaluation
    use_ddp: Flag = True  # false: the same as parallel: dp
    model: FreeForm = ConfigSection()  # the recipe's
    data: FreeForm = ConfigSection()  # the recipe's

    @field_validator("accumulate")
    @classmethod
    def _require_per_device(cls, value: int | None, info: ValidationInfo) -> int | None:
        batch = info.data.get("batch")
        if value is not None and batch is not None and batch.per_device is None:
            raise PydanticCustomError(
                "accumulate", "only valid with batch.per_device; with batch.global, set lanes instead"
            )
        return value

    @field_validator("evaluate_every")
    @classmethod
    def _require_time(cls, value: Duration) -> Duration:
        return require_time(value)

    @field_validator("steps")
    @classmethod
    def _require_one_length(cls, value: int | None, info: ValidationInfo) -> int | None:
        return _require_one(value, info, "epochs", "epochs and steps")
