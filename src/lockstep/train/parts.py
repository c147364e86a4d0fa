"""What a run trains: models, optimizers, averages and the loss scale by name; their parameters, and all their state.

`values` and `load` are what checkpoints hold of them, a part each: model, optimizer, average … and kept.NAME for what
else the run was asked to keep.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lockstep.checkpoint.contents import BUFFERS, KEPT
from lockstep.engine.digest import state_of
from lockstep.errors import UserError
from lockstep.train.average import MovingAverage
from lockstep.train.optimizer_state import load_optimizer, optimizer_value
from lockstep.train.precision import LossScaler
from lockstep.train.schedule import Factor, Schedule
from lockstep.world.plain_values import split

Models = nn.Module | Sequence[nn.Module]

_EXTRA_STATE = "_extra_state"  # as torch calls what a module's `get_extra_state` returns


class Resumable(Protocol):
    """What a checkpoint can hold besides: a curriculum, a sampler's temperature, a replay buffer."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Parts:
    def __init__(self) -> None:
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.schedules: dict[Optimizer, Schedule | Factor] = {}
        self.averages: dict[str, MovingAverage] = {}
        self.scaler: LossScaler | None = None
        self.kept: dict[str, Resumable] = {}
        self._parameters: dict[Any, list[Parameter]] = {}  # by the models they are of

    def has_model(self, model: nn.Module) -> bool:
        return any(model is known for known in self.models.values())

    def has_average(self, average: MovingAverage) -> bool:
        return any(average is known for known in self.averages.values())

    def add_model(self, model: nn.Module) -> None:
        self.models[_next_name("model", self.models)] = model

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Once, however often it is said."""
        if not any(optimizer is known for known in self.optimizers.values()):
            self.optimizers[_next_name("optimizer", self.optimizers)] = optimizer

    def add_average(self, average: MovingAverage) -> None:
        self.averages[_next_name("average", self.averages)] = average

    @property
    def any_batch_norm(self) -> bool:
        return any(isinstance(m, _BatchNorm) for model in self.models.values() for m in model.modules())

    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for each in self.optimizers.values() for group in each.param_groups]

    def look_again(self) -> None:
        """Models may have changed since their parameters were last asked for."""
        self._parameters = {}

    def parameters_of(self, models: Models | None) -> list[Parameter]:
        """The trainable parameters, each once; of all models if none is named."""
        key = None if models is None else models if isinstance(models, nn.Module) else tuple(models)
        if key not in self._parameters:
            chosen = self.models.values() if models is None else as_list(models)
            # Walking the modules takes longer than a small model's forward pass.
            self._parameters[key] = list(dict.fromkeys(p for model in chosen for p in model.parameters()))
        return [parameter for parameter in self._parameters[key] if parameter.requires_grad]

    def parameter_names(self) -> dict[Parameter, str]:
        """Under which a parameter is spoken of; several models are told apart."""
        several = len(self.models) > 1
        return {
            parameter: f"{prefix}.{name}" if several else name
            for prefix, model in self.models.items()
            for name, parameter in model.named_parameters()
        }

    def state(self) -> dict[str, Tensor]:
        """Every tensor that training changes, under a name that says what it is."""
        averages = {name: average.state() for name, average in self.averages.items()}
        scaler = {} if self.scaler is None else {"loss_scaler": self.scaler.state()}
        return state_of(self.models, self.optimizers, averages | scaler)

    def values(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold, by part; the tensors are the live ones."""
        values: dict[str, Any] = {}
        for name, model in self.models.items():
            values[name] = dict(model.state_dict())
            if buffers := _unsaved_buffers(model):
                values[name + BUFFERS] = buffers
        for name, optimizer in self.optimizers.items():
            values[name] = optimizer_value(optimizer, self.models)
        for name, average in self.averages.items():
            values[name] = average.state()
        if self.scaler is not None:
            values["loss_scaler"] = self.scaler.state()
        return values | {KEPT + name: thing.state_dict() for name, thing in self.kept.items()}

    def load(self, values: Mapping[str, Any], *, keep_settings: bool = False) -> None:
        """Take up saved values; `keep_settings`: the optimizers' rates and the like stay what they are now."""
        _check_names(self.values().keys(), values.keys())
        for name, model in self.models.items():
            _load_model(name, model, values[name], values.get(name + BUFFERS, {}))
        for name, optimizer in self.optimizers.items():
            load_optimizer(name, optimizer, self.models, values[name], keep_settings=keep_settings)
        for name, average in self.averages.items():
            average.load_state(values[name])
        if self.scaler is not None:
            self.scaler.load_state(values["loss_scaler"])
        for name, thing in self.kept.items():
            thing.load_state_dict(values[KEPT + name])

    def check_kept(self) -> None:
        """Can it be saved? Better asked before the first step than at the first save."""
        for name, thing in self.kept.items():
            try:
                split(thing.state_dict(), KEPT + name)
            except TypeError as error:
                raise UserError(f"run.keep({name!r}, …): {error}") from None


def as_list(models: Models) -> list[nn.Module]:
    return [models] if isinstance(models, nn.Module) else list(models)


def _next_name(kind: str, named: dict[str, Any]) -> str:
    return f"{kind}{len(named) or ''}"


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Those that `state_dict` leaves out; training may change them all the same."""
    saved = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers(remove_duplicate=False) if name not in saved}


def _check_names(ours: Iterable[str], saved: Iterable[str]) -> None:
    missing, unknown = sorted(set(ours) - set(saved)), sorted(set(saved) - set(ours))
    if missing or unknown:
        lines = [f"the checkpoint has no {name}" for name in missing]
        lines += [f"the checkpoint has {name}, and this run does not" for name in unknown]
        raise UserError("; ".join(lines) + ": prepare the same models, optimizers and averages before run.steps(…)")


@torch.no_grad()
def _load_model(name: str, model: nn.Module, weights: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
    own = model.state_dict(keep_vars=True) | _unsaved_buffers(model)
    for key, value in {**weights, **buffers}.items():
        ours = own.get(key)
        if key.split(".")[-1] == _EXTRA_STATE:  # the module's own business
            continue
        if isinstance(ours, Tensor) and (ours.shape, ours.dtype) != (value.shape, value.dtype):
            raise UserError(
                f"{name}/{key} is {_kind(ours)} and was saved as {_kind(value)}: the model is another one than before"
            )
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(f"the saved weights do not fit {name}: {error}") from None
    for key, value in buffers.items():
        own[key].copy_(value)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
