"""The schema of a training config, and the field types that schemas are written with.

A user's own is a subclass:

    class MyConfig(lockstep.Config):
        width: Count = 64

    config = MyConfig.from_file("run.yaml", ["optim.lr=1e-3"])
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from lockstep.config.draft import Builtin, read
from lockstep.config.duration import Duration

_LARGEST = 2**63 - 1  # what a tensor of indices can hold
_FLAGS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


class Frozen(BaseModel):
    """A part of a config: it cannot be changed, and a key that it does not have is an error."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        validate_by_name=True,  # in Python; a file knows a field by its alias only
        validate_by_alias=True,
        hide_input_in_errors=True,  # an error raised from Python must not show private text either
        ser_json_inf_nan="constants",
    )


def _read_whole(value: Any) -> Any:
    """Lets 1e3 through as 1000, and nothing else that is not a whole number already."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PydanticCustomError("whole_number", "expected a whole number")
    if abs(value) > _LARGEST:
        raise PydanticCustomError("out_of_range", "expected a whole number below 2⁶³")
    return value


def _read_flag(value: Any) -> Any:
    if isinstance(value, str):
        value = _FLAGS.get(value.lower(), value)
    if not isinstance(value, bool):
        raise PydanticCustomError("bool_type", "expected true or false")
    return value


def _read_lanes(value: Any) -> Any:
    if value == "auto":
        return value
    lanes = _read_whole(value)
    if lanes < 1 or lanes & (lanes - 1):
        raise PydanticCustomError("power_of_two", "expected auto or a power of two")
    return lanes


Whole = Annotated[int, Field(ge=0), BeforeValidator(_read_whole)]
"""A whole number, 0 or greater; 1e3 is 1000."""
Count = Annotated[int, Field(gt=0), BeforeValidator(_read_whole)]
"""A whole number greater than 0; 1e3 is 1000."""
Flag = Annotated[bool, BeforeValidator(_read_flag)]
"""true or false; also yes, no, on, off, in any case. Numbers are not flags."""
Lanes = Annotated[int | Literal["auto"], BeforeValidator(_read_lanes)]
"""A power of two, or auto."""
Positive = Annotated[float, Field(gt=0, strict=True, allow_inf_nan=False)]
"""A finite number greater than 0."""
NonNegative = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
"""A finite number, 0 or greater."""
DurationField = Annotated[Duration, PlainValidator(Duration.parse), PlainSerializer(str, return_type=str)]
"""`500 steps`, `2 epochs`, `1e6 samples`, or a whole number of steps."""


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        return Section.model_validate(value)
    if isinstance(value, list | tuple):
        return tuple(map(_freeze, value))
    return value


class Section(Frozen):
    """A free-form part of a config: any keys, read as attributes (`config.model.encoder.width`), frozen all the way."""

    model_config = ConfigDict(extra="allow")

    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_freeze)]]

    if TYPE_CHECKING:

        def __init__(self, **values: Any) -> None: ...

        def __getattr__(self, name: str) -> Any: ...

    @model_validator(mode="after")
    def _refuse_hidden_keys(self) -> Self:
        for name in self.model_extra or {}:
            if name in dir(Section):  # the attribute would be found first, and silently
                raise PydanticCustomError("hidden_key", "the key {name} is taken; choose another", {"name": name})
        return self


# Any to a type checker, so that a subclass may narrow the field to a Frozen class of its own.
FreeForm = Annotated[Any, GetPydanticSchema(lambda _source, handler: handler(Section))]


def _require_one(value: int | None, info: ValidationInfo, other: str, names: str) -> int | None:
    """Exactly one of two fields is given. A field's validator, not the model's: it runs beside other faults."""
    if other in info.data and (value is None) == (info.data[other] is None):
        raise PydanticCustomError("exactly_one", "give exactly one of {names}", {"names": names})
    return value


def _require_time(value: Duration) -> Duration:
    if not value.number:
        raise PydanticCustomError("duration", "expected a duration greater than 0, got {value}", {"value": str(value)})
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
        return None if value is None else _require_time(value)

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


class ActivationCheckpointingConfig(Frozen):
    """Modules whose activations are computed again in the backward pass; changes no bit."""

    every: Count = 1  # of them, so-many-th
    classes: tuple[str, ...] = ()  # by name; the model's repeated blocks if there is none


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
        return _require_time(value)


class MeshConfig(Frozen):
    """Processes along each axis of a mesh; of data and shard, the one that is left out is filled up."""

    data: Count | None = None  # groups, each with all of the model between them
    shard: Count | None = None  # processes that share out every parameter
    tensor: Count | None = None  # processes that share out the work of single layers, as tensor_plan says


class FsdpConfig(Frozen):
    """How parallel: fsdp, or a mesh, cuts a model up."""

    wrap: tuple[str, ...] = ()  # classes of modules that are gathered on their own; else by size:
    min_parameters: Positive = 1e6  # and more
    cpu_offload: Flag = False  # what is not being computed with stays in main memory
    reshard_after_forward: Flag = True  # false: gathered once a step instead of twice, for more memory


class WandbConfig(Frozen):
    """Weights & Biases. What is not said here is W&B's to decide: its own variables (WANDB_PROJECT …), its defaults."""

    project: str | None = None
    entity: str | None = None
    name: str | None = None  # the run folder's, unless said
    tags: tuple[str, ...] = ()
    mode: Literal["online", "offline", "disabled"] | None = None
    init_timeout_s: Positive = 60.0  # all ranks wait while rank 0 joins: stay below timeout_s
    finish_timeout_s: Positive = 60.0  # for sending the rest at the end
    required: Flag = False  # an error if W&B cannot start; else a warning


class LogConfig(Frozen):
    """Loggers beside the run folder's own events.jsonl, which is always written."""

    tensorboard: Flag = False
    wandb: WandbConfig | None = None


def _read_compression(value: Any) -> Any:
    return {"kind": value} if isinstance(value, str) else value


class CompressionConfig(Frozen):
    """How gradients travel, in fast mode; all but `kind` is PowerSGD's."""

    kind: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    rank: Count = 1
    start_after: DurationField = Duration.parse("10 steps")  # until then they go uncompressed
    min_compression_rate: Positive = 2.0  # where it would be less, too
    warm_start: Flag = True  # go on from the last approximation
    error_feedback: Flag = True  # add what one gradient's left out to the next

    @field_validator("rank", "start_after", "min_compression_rate", "warm_start", "error_feedback")
    @classmethod
    def _has_an_effect(cls, value: Any, info: ValidationInfo) -> Any:
        kind = info.data.get("kind", "powersgd")
        if kind != "powersgd" and value != cls.model_fields[str(info.field_name)].default:
            raise PydanticCustomError("powersgd", "is powersgd's, and compression.kind is {kind}", {"kind": kind})
        return value


CompressionField = Annotated[CompressionConfig, BeforeValidator(_read_compression)]
"""A kind's name, or a mapping with its settings."""


class Config(Frozen):
    """A training run. Recipes and users subclass it, and narrow `model` and `data` to Frozen classes of their own."""

    # Those that change no bit: a run may go on with others than it had. A subclass may name more.
    free_on_resume: ClassVar[frozenset[str]] = frozenset(
        {
            "activation_checkpointing",
            "bucket_mb",
            "checkpoint",
            "ddp_backend",
            "find_unused_parameters",
            "fsdp",
            "lanes_per_rank",
            "log",
            "log_every",
            "parallel",
            "tensor_plan",
            "timeout_s",
            "trace",
            "workers",
        }
    )

    recipe: str | None = None  # what `lockstep train` is to train; a loop of one's own needs none
    seed: Whole = 0
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
    trace: Flag = False  # write every step's digests down, to see where two runs part
    optim: OptimConfig = OptimConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    average: AverageConfig | None = None
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    threads: Annotated[Count, Field(le=1024)] = 1  # per process; never derived from the number of processes
    use_ddp: Flag = True  # false: parallel=dp
    ddp_backend: Literal["auto", "nccl", "gloo"] = "auto"
    timeout_s: Positive = 600.0
    log_every: Count = 10  # steps
    log: LogConfig = LogConfig()
    quick: Flag = False  # a smoke run: few steps, little data
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
        return _require_time(value)

    @field_validator("steps")
    @classmethod
    def _one_length(cls, value: int | None, info: ValidationInfo) -> int | None:
        return _require_one(value, info, "epochs", "epochs and steps")

    @classmethod
    def from_file(cls, path: str | Path, overrides: Iterable[str] = (), *, builtin: Builtin | None = None) -> Self:
        """The config in a YAML file with `key=value` overrides; all that is wrong with it in one ConfigError."""
        return read(path, overrides, builtin=builtin).check(cls)
