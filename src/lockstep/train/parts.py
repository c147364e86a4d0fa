"""What a run trains: models, optimizers, averages and the loss scale by name; their parameters, and all their state.

`values` and `load` are what checkpoints hold of them, a part each: model, optimizer, average … and kept.NAME for what
else the run was asked to keep, or state.NAME where that counts in its digest.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.checkpoint.contents import BUFFERS, COMPRESSION, KEPT, STATE
from lockstep.checkpoint.manifest import CheckpointError, check_part_name
from lockstep.engine.digest import flattened, state_of, tensors_in
from lockstep.errors import UserError
from lockstep.train.average import MovingAverage
from lockstep.train.optimizer_state import load_optimizer, optimizer_value, whole_state
from lockstep.train.precision import LossScaler
from lockstep.train.schedule import Factor, Schedule
from lockstep.train.strategies.strategy import Strategy
from lockstep.world.boxes import lying_like, to_save, whole_of
from lockstep.world.plain_values import split

logger = logging.getLogger("lockstep")

Models = nn.Module | Sequence[nn.Module]

_EXTRA_STATE = "_extra_state"  # as torch calls what a module's `get_extra_state` returns


class Resumable(Protocol):
    """What a checkpoint can hold besides: a curriculum, a sampler's temperature, a replay buffer."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Parts:
    strategy: Strategy  # how they are spread over the ranks, and
    why_strategy: str

    def __init__(self) -> None:
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.schedules: dict[Optimizer, Schedule | Factor] = {}
        self.averages: dict[str, MovingAverage] = {}
        self.scaler: LossScaler | None = None
        self.kept: dict[str, Resumable] = {}  # by the names of their parts
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

    def keep(self, name: str, thing: Resumable, *, in_digest: bool, once: bool) -> None:
        """For `Run.keep`; `once`: another thing under the same name is an error."""
        part = (STATE if in_digest else KEPT) + name
        try:
            check_part_name(part)
        except CheckpointError as error:
            raise UserError(f"run.keep({name!r}, …): {error}") from None
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UserError(f"run.keep({name!r}, …) needs an object with state_dict and load_state_dict")
        earlier, self.kept[part] = self.kept.get(part, thing), thing
        if earlier is not thing and once:
            raise UserError(f"run.keep({name!r}, …): something else is kept under this name already")

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
            if any(isinstance(model, DistributedDataParallel) for model in chosen):
                raise UserError(
                    "DistributedDataParallel would share gradients once more: use what run.prepare(model) returns"
                )
            self.strategy.settle()
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
        return dict(self.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The same one after another: those that are spread over the ranks need not be there whole all at once."""
        self.strategy.settle()
        averages = {name: average.state() for name, average in self.averages.items()}
        scaler = {} if self.scaler is None else {"loss_scaler": self.scaler.state()}
        for name, tensor in state_of(self.models, others=averages | scaler).items():
            yield name, whole_of(tensor)
        for name, optimizer in self.optimizers.items():
            for owner, state in whole_state(optimizer, self.models, self.strategy):
                yield from flattened(name, {owner: state}).items()
        for name, thing in self.kept.items():
            if name.startswith(STATE):
                yield from tensors_in(thing.state_dict(), name)

    def gradients(self) -> dict[str, Tensor | None]:
        """Each trainable parameter's, as the optimizers saw it, under the name that the parameter has in the state."""
        return {
            f"{prefix}/{name}": self.strategy.whole(parameter, self.strategy.holder(parameter).grad)
            for prefix, model in self.models.items()
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def values(self) -> dict[str, Any]:
        """Everything that a checkpoint must hold, by part; the tensors are the live ones."""
        self.strategy.settle()
        values: dict[str, Any] = {}
        for name, model in self.models.items():
            values[name] = {key: to_save(value) for key, value in model.state_dict().items()}
            if buffers := _unsaved_buffers(model):
                values[name + BUFFERS] = buffers
        for name, optimizer in self.optimizers.items():
            values[name] = optimizer_value(optimizer, self.models, self.strategy)
        for name, average in self.averages.items():
            values[name] = {key: to_save(value) for key, value in average.state().items()}
        if self.scaler is not None:
            values["loss_scaler"] = self.scaler.state()
        if (compression := self.strategy.compression_value(self._full_names())) is not None:
            values[COMPRESSION] = compression
        return values | {name: thing.state_dict() for name, thing in self.kept.items()}

    def num_bytes(self) -> int:
        """Of all ranks' tensors in those values. Any rank may ask."""
        splits = [split(value) for value in self.values().values()]
        whole = sum(tensor.nbytes for each in splits for tensor in each.tensors.values())
        return whole + sum(
            shard.local.element_size() * prod(shard.shape) for each in splits for shard in each.shards.values()
        )

    def load(self, values: Mapping[str, Any], *, keep_settings: bool = False) -> None:
        """Take up saved values; `keep_settings`: the optimizers' rates and the like stay what they are now."""
        _check_names(self.values().keys() - {COMPRESSION}, values.keys() - {COMPRESSION})
        for name, model in self.models.items():
            _load_model(name, model, values[name], values.get(name + BUFFERS, {}))
        for name, optimizer in self.optimizers.items():
            load_optimizer(name, optimizer, self.models, values[name], self.strategy, keep_settings=keep_settings)
        for name, average in self.averages.items():
            ours = average.state()
            average.load_state({key: lying_like(ours.get(key), value) for key, value in values[name].items()})
        if self.scaler is not None:
            self.scaler.load_state(values["loss_scaler"])
        self._load_compression(values.get(COMPRESSION))
        for name, thing in self.kept.items():
            thing.load_state_dict(values[name])

    def _load_compression(self, value: Mapping[str, Any] | None) -> None:
        """It may be another now, or none: whoever comes here with other settings has accepted that."""
        names = self._full_names()
        is_wanted = self.strategy.compression_value(names) is not None
        if value is not None and is_wanted:
            self.strategy.load_compression(value, names)
        elif value:
            logger.warning("what compression has left out of the gradients so far is dropped")
        elif is_wanted:
            logger.warning("compression begins anew: the checkpoint does not say what it has left out so far")

    def _full_names(self) -> dict[Parameter, str]:
        return {p: f"{prefix}/{name}" for prefix, model in self.models.items() for name, p in model.named_parameters()}

    def check_kept(self) -> None:
        """Can it be saved? Better asked before the first step than at the first save."""
        for name, thing in self.kept.items():
            try:
                split(thing.state_dict(), name)
            except TypeError as error:
                raise UserError(f"run.keep({name.partition('.')[2]!r}, …): {error}") from None


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
        model.load_state_dict({key: lying_like(own.get(key), value) for key, value in weights.items()})
    except RuntimeError as error:
        raise UserError(f"the saved weights do not fit {name}: {error}") from None
    for key, value in buffers.items():
        own[key].copy_(value)


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
