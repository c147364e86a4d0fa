"""How a run computes its steps: one value with everything that can be chosen about them."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from lockstep.engine.buffers import Rule
from lockstep.errors import UserError

Determinism = Literal["lockstep", "fast"]
PrecisionName = Literal["fp32", "bf16", "fp16"]
OnNonFinite = Literal["stop", "skip", "ignore"]

_CHOICES: dict[str, tuple[str, ...]] = {
    "determinism": ("lockstep", "fast"),
    "precision": ("fp32", "bf16", "fp16"),
    "on_nonfinite": ("stop", "skip", "ignore"),
}
_CHANGE_NO_BIT = ("bucket_mb", "find_unused_parameters")


@dataclass(frozen=True)
class StepOptions:
    """The keyword arguments of `Run` that say what a step does.

    `precision`: bf16 and fp16 run the lanes under autocast; fp16 scales the loss too, and skips steps that overflow.
    `tf32` allows it in fp32 products on a GPU. `determinism="fast"` trades equal bits for torch's own reductions.
    `on_nonfinite`: what a NaN or an infinity in the loss or the gradients does: `stop` the run, `skip` the step, on
    every rank alike, or `ignore` it, which saves looking. `buffers` says how lanes' buffers are combined, by name
    pattern: `{"*.codebook": "mean" | "first" | "max"}`. `bucket_mb` of gradients travel together.
    """

    seed: int = 0  # starts every random stream, also the one that weights are drawn from
    determinism: Determinism = "lockstep"
    precision: PrecisionName = "fp32"
    tf32: bool = False
    clip_norm: float | None = None
    on_nonfinite: OnNonFinite = "stop"
    buffers: Mapping[str, Rule] = field(default_factory=dict)
    bucket_mb: float = 4.0
    find_unused_parameters: bool = False  # fast mode only; lockstep mode needs no telling

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"{name}={getattr(self, name)!r}: expected {', '.join(choices[:-1])} or {choices[-1]}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"clip_norm={self.clip_norm!r}: expected a number greater than 0, or None")

    @classmethod
    def names(cls) -> list[str]:
        return [each.name for each in fields(cls)]

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> Self:
        """From keyword arguments; one that there is not is an error that names the nearest."""
        for name in given:
            if name not in cls.names():
                nearest = difflib.get_close_matches(name, cls.names(), n=1)
                hint = f"; did you mean {nearest[0]}?" if nearest else ""
                raise UserError(f"Run has no option {name}{hint}")
        return cls(**given)

    def numerics(self) -> dict[str, Any]:
        """Those that change the result's bits."""
        chosen = {name: getattr(self, name) for name in self.names() if name not in _CHANGE_NO_BIT}
        return chosen | {"buffers": dict(self.buffers)}
