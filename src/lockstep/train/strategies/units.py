"""Which submodules of a model are gathered and shared on their own: `fsdp.wrap` and `fsdp.min_parameters`.

While one unit computes, its parameters are there whole; so the more units, the less memory, and the more collectives.
"""

from collections import Counter
from collections.abc import Iterator

from torch import nn
from torch.nn import Parameter

from lockstep.errors import UserError
from lockstep.train.fsdp_options import FsdpOptions


def choose_units(model: nn.Module, options: FsdpOptions) -> list[nn.Module]:
    """Inner ones before those around them; the model itself comes last."""
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
                    f"fsdp.wrap: {path} ({type(module).__name__}) shares {shared} with a module outside of it: "
                    "wrap what is around both, or neither"
                )
            chosen.append(module)
    return chosen


def _by_size(model: nn.Module, least: float) -> list[nn.Module]:
    """As deep inside as there are enough parameters that no unit has yet."""
    users = _users_of(model)
    taken: set[Parameter] = set()
    # An embedding's weight is often the output layer's too, without being its parameter: it belongs to what is around.
    apart = inside_attention(model) | {module for module in model.modules() if isinstance(module, nn.Embedding)}
    chosen = []
    for _, module in _inner_first(model):
        own = {parameter for parameter in module.parameters() if parameter not in taken}
        is_large = sum(parameter.numel() for parameter in own) >= least
        if is_large and _is_called(module) and module not in apart and not _shared_outside(module, users):
            chosen.append(module)
            taken |= own
    return chosen


def inside_attention(model: nn.Module) -> set[nn.Module]:
    """Modules whose weights torch's own attention uses without calling them: nothing can be done around a call."""
    return {
        inner
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)
        for inner in module.modules()
        if inner is not module
    }


def _is_called(module: nn.Module) -> bool:
    """A ModuleList, or a ParameterList, is not."""
    return type(module).forward is not nn.Module.forward


def _inner_first(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules inside, each after those that are inside of it."""
    modules = [(path, module) for path, module in model.named_modules() if module is not model]
    yield from reversed(modules)


def _users_of(model: nn.Module) -> Counter[Parameter]:
    """How many modules have each parameter as their own."""
    return Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)


def _shared_outside(module: nn.Module, users: Counter[Parameter]) -> str | None:
    inside = _users_of(module)
    return next((name for name, p in module.named_parameters() if inside[p] < users[p]), None)
