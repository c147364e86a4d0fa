"""How `parallel=fsdp`, or a mesh, cuts a model up: one value with what can be chosen about that."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from lockstep.config.arguments import require_flag, require_known, require_positive
from lockstep.errors import UserError


@dataclass(frozen=True)
class FsdpOptions:
    """`wrap`: classes of modules that are gathered on their own; without, those with `min_parameters` or more.

    `cpu_offload`: what is not being computed with stays in main memory. `reshard_after_forward=False`: gathered once a
    step instead of twice, for more memory.
    """

    wrap: tuple[str, ...] = ()  # a list of names, and one name by itself, become this
    min_parameters: float = 1e6
    cpu_offload: bool = False
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        wrap = (self.wrap,) if isinstance(self.wrap, str) else self.wrap
        if not isinstance(wrap, Iterable) or not all(isinstance(name, str) for name in wrap):
            raise UserError(f"fsdp: wrap={wrap!r}: expected names of classes")
        object.__setattr__(self, "wrap", tuple(wrap))
        require_positive("fsdp: min_parameters", self.min_parameters)
        require_flag("fsdp: cpu_offload", self.cpu_offload)
        require_flag("fsdp: reshard_after_forward", self.reshard_after_forward)

    @classmethod
    def read(cls, given: Any) -> Self:
        if isinstance(given, cls):
            return given
        names = [each.name for each in fields(cls)]
        if not isinstance(given, Mapping):
            raise UserError(f"fsdp={given!r}: expected a dictionary with any of {', '.join(names)}")
        require_known("fsdp has no option", given, names)
        return cls(**given)
