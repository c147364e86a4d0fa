"""FSDP's options, and which submodules become units: `fsdp.wrap` and `fsdp.min_parameters`.

While a unit computes, its parameters are gathered. The more units, the less memory, and the more collectives.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from torch import nn
from torch.nn import Parameter

from lockstep.config.argument_checks import require_flag, require_known, require_positive
from lockstep.engine.compiled_models import named_parameters
from lockstep.errors import UserError


@dataclass(frozen=True)
class FsdpOptions:
    """How FSDP divides a model.

    Args:
        wrap: the classes of modules that become units.
        min_parameters: without `wrap`, modules with at least this many parameters become units.
        cpu_offload: keep parameters in host memory while they are not used.
        reshard_after_forward: free gathered parameters between forward and backward. False gathers once a step instead
            of twice, and needs more memory.
    """

    wrap: tuple[str, ...] = ()  # a list of names, or a single name, is accepted too
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
        """Return the options given by a mapping."""
        if isinstance(given, cls):
            return given
        names = [each.name for each in fields(cls)]
        if not isinstance(given, Mapping):
            raise UserError(f"fsdp={given!r}: expected a dictionary with any of {', '.join(names)}")
        require_known("fsdp has no option", given, names)
        return cls(**given)


def choose_units(model: nn.Module, options: FsdpOptions) -> list[nn.Module]:
    """Return the modules that become FSDP units, inner ones first; the model itself comes last."""
    chosen = _by_class(model, options.wrap) if options.wrap else _by_size(model, options.min_parameters)
    return [*chosen, model]


def _by_class(model: nn.Module, names: tuple[str, ...]) -> list[nn.Module]:
    known = {type(module).__name__ for module in model.modules()}
    for name in names:
        if name not in known:
            raise UserError(
                f"fsdp.wrap: the model has no module of a class {name!r}; it has {', '.join(sorted(known))}"
            )
    users = _users_of(model)
    chosen = []
    for path, module in _inner_first(model):
        if type(module).__name__ in names:
            if shared := _shared_outside(module, users):
                raise UserError(
                    f"fsdp.wrap: {path} ({type(module).__name__}) shares {shared} with a module outside: "
                    "wrap a module that contains both, or neither"
                )
            chosen.append(module)
    return chosen


def _by_size(model: nn.Module, least: float) -> list[nn.Module]:
    """Choose the innermost modules with enough parameters that no unit has yet."""
    users = _users_of(model)
    taken: set[Parameter] = set()
    # An embedding's weight may be used by an output layer that does not hold it: it stays with the module around it.
    excluded = inside_attention(model) | {module for module in model.modules() if isinstance(module, nn.Embedding)}
    chosen = []
    for _, module in _inner_first(model):
        own = {parameter for parameter in module.parameters() if parameter not in taken}
        is_large = sum(parameter.numel() for parameter in own) >= least
        if is_large and _is_called(module) and module not in excluded and not _shared_outside(module, users):
            chosen.append(module)
            taken |= own
    return chosen


def inside_attention(model: nn.Module) -> set[nn.Module]:
    """Return the modules whose weights torch's attention uses without calling them, so that no hook would run."""
    return {
        inner
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for inner in module.modules()
        if inner is not module
    }


def _is_called(module: nn.Module) -> bool:
    """Return whether a module has a forward pass: a ModuleList or a ParameterList has none."""
    return type(module).forward is not nn.Module.forward


def _inner_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules inside a model, each after those inside it."""
    modules = [(path, module) for path, module in model.named_modules() if module is not model]
    yield from reversed(modules)


def _users_of(model: nn.Module) -> Counter[Parameter]:
    """Return how many modules hold each parameter directly."""
    return Counter(parameter for module in model.modules() for parameter in own_parameters(module))


def own_parameters(module: nn.Module) -> list[Parameter]:
    """Return the parameters that a module holds directly."""
    return [parameter for _, parameter in module.named_parameters(recurse=False, remove_duplicate=False)]


def _shared_outside(module: nn.Module, users: Counter[Parameter]) -> str | None:
    """Return the name of a parameter that a module outside holds, too."""
    inside = _users_of(module)
    return next((name for name, p in named_parameters(module) if inside[p] < users[p]), None)
