"""How a model and its work are spread over processes: the sections of a config that say it."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from lockstep.config.duration import Duration
from lockstep.config.fields import Count, DurationField, Flag, Frozen, Positive


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


class ActivationCheckpointingConfig(Frozen):
    """Modules whose activations are computed again in the backward pass; changes no bit."""

    every: Count = 1  # of them, so-many-th
    classes: tuple[str, ...] = ()  # by name; the model's repeated blocks if there is none
