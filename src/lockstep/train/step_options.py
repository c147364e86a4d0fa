"""The options of a run that say how its steps are computed, checked, in one value."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral
from typing import Any, Literal

from lockstep.config.argument_checks import require_positive
from lockstep.engine.compression import Compression
from lockstep.engine.lane_buffers import BufferRule
from lockstep.errors import UserError
from lockstep.train.activation_checkpointing import check_checkpointing_options
from lockstep.train.strategies.fsdp_units import FsdpOptions

Determinism = Literal["lockstep", "fast"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
OnNonFinite = Literal["stop", "skip", "ignore"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "determinism": ("lockstep", "fast"),
    "precision": ("fp32", "bf16", "fp16"),
    "on_nonfinite": ("stop", "skip", "ignore"),
}
_NOT_NUMERICS = (
    "activation_checkpointing",
    "bucket_mb",
    "find_unused_parameters",
    "fsdp",
    "parallel",
    "tensor_plan",
)


@dataclass(frozen=True)
class StepOptions:
    """The options of `Run` that decide what a step computes and how; `Run` documents each of them."""

    seed: int = 0  # starts every random stream, including the one that weights are drawn from
    determinism: Determinism = "lockstep"
    precision: PrecisionName = "fp32"
    tf32: bool = False
    clip_norm: float | None = None
    on_nonfinite: OnNonFinite = "stop"
    buffers: Mapping[str, BufferRule] = field(default_factory=dict)
    bucket_mb: float = 4.0
    find_unused_parameters: bool = False  # fast mode only; lockstep mode needs no flag
    compression: Any = "none"  # becomes a Compression
    activation_checkpointing: Mapping[str, Any] | None = None  # {"every": k, "classes": […]}, either or neither
    parallel: str | Mapping[str, int | None] = "auto"  # a mapping: the sizes of a mesh
    fsdp: FsdpOptions = field(default_factory=FsdpOptions)  # or a dictionary of its fields
    tensor_plan: Mapping[str, str] = field(default_factory=dict)  # by module name pattern: column, row, sequence …

    def __post_init__(self) -> None:
        object.__setattr__(self, "fsdp", FsdpOptions.read(self.fsdp))
        if isinstance(self.seed, bool) or not isinstance(self.seed, Integral):
            raise UserError(f"seed={self.seed!r}: expected a whole number")
        object.__setattr__(self, "seed", int(self.seed))  # numpy's are accepted
        if not isinstance(self.buffers, Mapping):
            raise UserError(
                f"buffers={self.buffers!r}: expected a rule for each name pattern, {{'*.codebook': 'mean'}}"
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"{name}={getattr(self, name)!r}: expected {', '.join(choices[:-1])} or {choices[-1]}")
        if self.clip_norm is not None:
            require_positive("clip_norm", self.clip_norm, otherwise=", or None")
        require_positive("bucket_mb", self.bucket_mb)
        object.__setattr__(self, "compression", Compression.read(self.compression))
        if self.activation_checkpointing is not None:
            _check_recomputation(self.activation_checkpointing)
        if not isinstance(self.parallel, str | Mapping):
            raise UserError(f"parallel={self.parallel!r}: expected a name, or the sizes of a mesh, as in {{'data': 2}}")
        if not isinstance(self.tensor_plan, Mapping) or not _are_names(self.tensor_plan.values()):
            raise UserError(
                f"tensor_plan={self.tensor_plan!r}: expected a style for each module name pattern, as in "
                "{'*.query': 'column'}"
            )

    @property
    def bucket_bytes(self) -> int:
        return int(self.bucket_mb * 2**20)

    @classmethod
    def names(cls) -> list[str]:
        return [each.name for each in fields(cls)]

    def numerics(self) -> dict[str, Any]:
        """Return the options that change the result's bits."""
        chosen = {name: getattr(self, name) for name in self.names() if name not in _NOT_NUMERICS}
        compression = chosen.pop("compression").plain()
        if compression != "none":  # older runs do not have it
            chosen["compression"] = compression
        return chosen | {"buffers": dict(self.buffers)}


def _check_recomputation(given: Any) -> None:
    if not isinstance(given, Mapping) or not given.keys() <= {"every", "classes"}:
        raise UserError(f"activation_checkpointing={given!r}: expected a dictionary with any of every, classes")
    check_checkpointing_options(**given)


def _are_names(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)
