"""The state that training changes: models, optimizers, EMAs, the loss scale, and whatever a script has registered.

`values` and `load` convert it to and from what checkpoints hold, by part: model, optimizer, average …, and kept.NAME
for registered state, or state.NAME if that counts in the digest.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lockstep.checkpoint.checkpoint_contents import (
    AVERAGE_PREFIX,
    BUFFERS_SUFFIX,
    COMPRESSION_PART,
    KEPT_PREFIX,
    MODEL_PREFIX,
    OPTIMIZER_PREFIX,
    SCALER_PART,
    STATE_PREFIX,
    renamed,
)
from lockstep.checkpoint.manifest import CheckpointError, check_part_name
from lockstep.config.plurals import count_noun
from lockstep.engine.compiled_models import (
    is_compiled,
    load_state_by_name,
    named_buffers,
    named_parameters,
    state_by_name,
    uncompiled,
    without_wrapper_names,
)
from lockstep.engine.state_digest import flatten_optimizer_state, named_tensors, state_of
from lockstep.engine.torch_internals import COMPILED_CHILD, is_batch_norm
from lockstep.errors import UserError
from lockstep.train.optim.ema import ExponentialMovingAverage
from lockstep.train.optim.lr_schedule import Factor, Schedule
from lockstep.train.optim.mixed_precision import LossScaler
from lockstep.train.resume.optimizer_state import load_optimizer, optimizer_value, whole_state
from lockstep.train.strategies.parallel_strategy import ParallelStrategy
from lockstep.world.dtensor import distribute_like, dtensor_to_save, full_tensor
from lockstep.world.process_memory import is_out_of_memory
from lockstep.world.serialization import split_values

logger = logging.getLogger("lockstep")

Models = nn.Module | Sequence[nn.Module]

_EXTRA_STATE = "_extra_state"  # as torch calls what a module's `get_extra_state` returns
_MAX_PROBLEM = 300  # characters


class Resumable(Protocol):
    """Anything with a `state_dict` that can be loaded again: a curriculum, a temperature, a replay buffer."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class TrainState:
    """Everything that one run trains, by name."""

    strategy: ParallelStrategy  # how it is spread over the ranks
    why_strategy: str  # in words

    def __init__(self) -> None:
        self.models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.schedules: dict[Optimizer, Schedule | Factor] = {}
        self.averages: dict[str, ExponentialMovingAverage] = {}
        self.scaler: LossScaler | None = None
        self.registered: dict[str, Resumable] = {}  # by part name
        self._parameters: dict[Any, list[Parameter]] = {}  # by model

    def has_model(self, model: nn.Module) -> bool:
        return any(uncompiled(model) is uncompiled(known) for known in self.models.values())

    def has_average(self, average: ExponentialMovingAverage) -> bool:
        return any(average is known for known in self.averages.values())

    def add_model(self, model: nn.Module) -> None:
        self.models[_next_name(MODEL_PREFIX, self.models)] = model

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer. Adding it again has no effect."""
        if not any(optimizer is known for known in self.optimizers.values()):
            self.optimizers[_next_name(OPTIMIZER_PREFIX, self.optimizers)] = optimizer

    def add_average(self, average: ExponentialMovingAverage) -> None:
        self.averages[_next_name(AVERAGE_PREFIX, self.averages)] = average

    def register(self, name: str, thing: Resumable, *, in_digest: bool, once: bool) -> None:
        """Register state for `Run.register_state`. `once`: another thing under the same name is an error."""
        if not isinstance(name, str):
            raise UserError(f"run.register_state({type(name).__name__}, …): the name comes first")
        part = (STATE_PREFIX if in_digest else KEPT_PREFIX) + name
        try:
            check_part_name(part)
        except CheckpointError as error:
            raise UserError(f"run.register_state({name!r}, …): {error}") from None
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UserError(f"run.register_state({name!r}, …) needs an object with state_dict and load_state_dict")
        earlier, self.registered[part] = self.registered.get(part, thing), thing
        if earlier is not thing and once:
            raise UserError(
                f"run.register_state({name!r}, …): something else is registered under this name already: "
                "choose another name"
            )

    @property
    def any_batch_norm(self) -> bool:
        return any(is_batch_norm(m) for model in self.models.values() for m in model.modules())

    @property
    def any_compiled(self) -> bool:
        return any(is_compiled(model) for model in self.models.values())

    def check_optimizers(self) -> None:
        """Raise if an optimizer has parameters of no prepared model: their gradients would stay this rank's own."""
        prepared = {parameter for model in self.models.values() for parameter in model.parameters()}
        for optimizer in self.optimizers.values():
            own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            strangers = [parameter for parameter in own if parameter.requires_grad and parameter not in prepared]
            if strangers:
                raise UserError(
                    f"{type(optimizer).__name__} has {count_noun(len(strangers), 'parameter')} of no prepared model, "
                    f"the first of shape {tuple(strangers[0].shape)}: make it of the parameters of run.prepare(model), "
                    "and put parameters of your own into a module"
                )

    def untrained_parameters(self) -> list[str]:
        """Return the names of the parameters that require gradients and are in no optimizer, if there is one."""
        if not self.optimizers:
            return []
        trained = {p for each in self.optimizers.values() for group in each.param_groups for p in group["params"]}
        return [name for p, name in self.parameter_names().items() if p.requires_grad and p not in trained]

    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for each in self.optimizers.values() for group in each.param_groups]

    def forget_parameters(self) -> None:
        """Forget the lists of parameters: models may have changed since."""
        self._parameters = {}

    def parameters_of(self, models: Models | None) -> list[Parameter]:
        """Return the trainable parameters of these models, or of all models, each once."""
        key = None if models is None else models if isinstance(models, nn.Module) else tuple(models)
        if key not in self._parameters:
            chosen = self.models.values() if models is None else as_list(models)
            if any(isinstance(model, DistributedDataParallel) for model in chosen):
                raise UserError(
                    "DistributedDataParallel would reduce gradients a second time: use what run.prepare(model) returns"
                )
            self.strategy.settle()
            # Walking the modules takes longer than a small model's forward pass.
            self._parameters[key] = list(dict.fromkeys(p for model in chosen for p in model.parameters()))
            if models is not None:
                self._check_prepared(self._parameters[key], chosen)
        return [parameter for parameter in self._parameters[key] if parameter.requires_grad]

    def _check_prepared(self, parameters: Sequence[Parameter], chosen: Iterable[nn.Module]) -> None:
        """Raise if parameters are in none of the prepared models: ranks might have different ones."""
        prepared = {parameter for model in self.models.values() for parameter in model.parameters()}
        if not prepared.issuperset(parameters):
            names = ", ".join(type(model).__name__ for model in chosen)
            raise UserError(
                f"{names} has parameters that are in no prepared model: call model = run.prepare(model) first, and "
                "make no new parameters after it"
            )

    def parameter_names(self) -> dict[Parameter, str]:
        """Return each parameter's name in messages; with the model's name if there are several models."""
        several = len(self.models) > 1
        return {
            parameter: f"{prefix}.{name}" if several else name
            for prefix, model in self.models.items()
            for name, parameter in named_parameters(model)
        }

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that training changes, by name."""
        return dict(self.tensors())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the same, one at a time: sharded tensors are gathered one after another."""
        self.strategy.settle()
        averages = {name: average.state() for name, average in self.averages.items()}
        scaler = {} if self.scaler is None else {SCALER_PART: self.scaler.state()}
        for name, tensor in state_of(self.models, others=averages | scaler).items():
            yield name, full_tensor(tensor)
        for name, optimizer in self.optimizers.items():
            for owner, state in whole_state(optimizer, self.models, self.strategy):
                yield from flatten_optimizer_state(name, {owner: state}).items()
        for name, thing in self.registered.items():
            if name.startswith(STATE_PREFIX):
                yield from named_tensors(thing.state_dict(), name)

    def gradients(self) -> dict[str, Tensor | None]:
        """Return each trainable parameter's gradient, as the optimizers saw it, by the parameter's name."""
        return {
            f"{prefix}/{name}": self.strategy.whole(parameter, self.strategy.holder(parameter).grad)
            for prefix, model in self.models.items()
            for name, parameter in named_parameters(model)
            if parameter.requires_grad
        }

    def named_gradients(self, parameters: Sequence[Parameter]) -> dict[str, Tensor]:
        """Return this rank's gradients of these parameters, by name, in the tensors that the optimizers use."""
        names = self.parameter_names()
        gradients = {names[parameter]: self.strategy.holder(parameter).grad for parameter in parameters}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def values(self) -> dict[str, Any]:
        """Return everything that a checkpoint holds, by part; the tensors are not copies."""
        self.strategy.settle()
        values: dict[str, Any] = {}
        for name, model in self.models.items():
            values[name] = {key: dtensor_to_save(value) for key, value in state_by_name(model).items()}
            if buffers := _unsaved_buffers(model):
                values[name + BUFFERS_SUFFIX] = buffers
        for name, optimizer in self.optimizers.items():
            values[name] = optimizer_value(optimizer, self.models, self.strategy)
        for name, average in self.averages.items():
            values[name] = {key: dtensor_to_save(value) for key, value in average.state().items()}
        if self.scaler is not None:
            values[SCALER_PART] = self.scaler.state()
        if (compression := self.strategy.compression_value(self._full_names())) is not None:
            values[COMPRESSION_PART] = compression
        return values | {name: thing.state_dict() for name, thing in self.registered.items()}

    def num_bytes(self) -> int:
        """Return the size of all ranks' tensors in those values. Any rank may call it alone."""
        splits = [split_values(value) for value in self.values().values()]
        whole = sum(tensor.nbytes for each in splits for tensor in each.tensors.values())
        return whole + sum(
            shard.local.element_size() * prod(shard.shape) for each in splits for shard in each.shards.values()
        )

    def load(self, values: Mapping[str, Any], *, keep_settings: bool = False) -> None:
        """Load saved values; `keep_settings`: optimizers keep their current learning rates and other settings."""
        values = self._with_plain_names(values)
        _check_names(self.values().keys() - {COMPRESSION_PART}, values.keys() - {COMPRESSION_PART})
        for name, model in self.models.items():
            _load_model(name, model, values[name], values.get(name + BUFFERS_SUFFIX, {}))
        for name, optimizer in self.optimizers.items():
            with _naming_misfits(name):
                load_optimizer(name, optimizer, self.models, values[name], self.strategy, keep_settings=keep_settings)
        for name, average in self.averages.items():
            with _naming_misfits(name):
                ours = average.state()
                average.load_state({key: distribute_like(ours.get(key), value) for key, value in values[name].items()})
        if self.scaler is not None:
            with _naming_misfits(SCALER_PART):
                self.scaler.load_state(values[SCALER_PART])
        with _naming_misfits(COMPRESSION_PART):
            self._load_compression(values.get(COMPRESSION_PART))
        for name, thing in self.registered.items():
            thing.load_state_dict(values[name])

    def _with_plain_names(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return saved values without the names that torch.compile inserts, which earlier versions saved."""
        own = {name for model in self.models.values() for name in _own_tensors(model)}
        return renamed(values, lambda name: name if name in own else without_wrapper_names(name))

    def _load_compression(self, value: Mapping[str, Any] | None) -> None:
        """Load the compressor's state. Compression may be set differently now, if resume="force" has accepted that."""
        names = self._full_names()
        is_wanted = self.strategy.compression_value(names) is not None
        if value is not None and is_wanted:
            self.strategy.load_compression(value, names)
        elif value:
            logger.warning("the gradient error that compression has accumulated is dropped")
        elif is_wanted:
            logger.warning("the checkpoint has no accumulated gradient error: compression starts from zero")

    def _full_names(self) -> dict[Parameter, str]:
        return {p: f"{prefix}/{name}" for prefix, model in self.models.items() for name, p in named_parameters(model)}

    def check_registered(self) -> None:
        """Raise if registered state cannot be saved: before the first step, not at the first save."""
        for name, thing in self.registered.items():
            try:
                split_values(thing.state_dict(), "state_dict()")
            except UserError as error:
                raise UserError(f"run.register_state({name.partition('.')[2]!r}, …): {error}") from None


def as_list(models: Models) -> list[nn.Module]:
    return [models] if isinstance(models, nn.Module) else list(models)


def _next_name(kind: str, named: dict[str, Any]) -> str:
    return f"{kind}{len(named) or ''}"


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that `state_dict` omits; training may change them all the same."""
    saved = state_by_name(model).keys()
    return {name: buffer for name, buffer in named_buffers(model) if name not in saved}


def _own_tensors(model: nn.Module) -> dict[str, Any]:
    """Return everything that a checkpoint of the model holds."""
    return state_by_name(model, keep_vars=True) | _unsaved_buffers(model)


def _check_names(ours: Iterable[str], saved: Iterable[str]) -> None:
    missing, unknown = sorted(set(ours) - set(saved)), sorted(set(saved) - set(ours))
    if missing or unknown:
        lines = [f"the checkpoint has no {_part_words(name)}" for name in missing]
        lines += [f"the checkpoint has {_part_words(name)}, which this run does not have" for name in unknown]
        raise UserError(
            f"{'; '.join(lines)}: before run.steps(…), make the same calls of run.prepare, run.optimizer, run.ema and "
            "run.register_state as the run that was saved"
        )


def _part_words(name: str) -> str:
    """Describe a part as the script knows it."""
    for prefix, option in ((KEPT_PREFIX, ""), (STATE_PREFIX, " (in_digest=True)")):
        if name.startswith(prefix):
            return f"registered state {name.removeprefix(prefix)!r}{option}"
    return name


@torch.no_grad()
def _load_model(name: str, model: nn.Module, weights: Mapping[str, Any], buffers: Mapping[str, Tensor]) -> None:
    own = _own_tensors(model)
    for key, value in {**weights, **buffers}.items():
        ours = own.get(key)
        if key.split(".")[-1] == _EXTRA_STATE:  # checked by the module itself
            continue
        saved = _kind(value) if isinstance(value, Tensor) else f"no tensor but a {type(value).__name__}"
        if isinstance(ours, Tensor) and _kind(ours) != saved:
            raise _misfit(name, f"{key} is {_kind(ours)} and was saved as {saved}")
    try:
        load_state_by_name(model, {key: distribute_like(own.get(key), value) for key, value in weights.items()})
    except RuntimeError as error:
        listed = str(error).partition(":\n")[2] or str(error)  # without torch's heading, where there is one
        listed = listed.replace(f"{COMPILED_CHILD}.", "")
        raise _misfit(name, " ".join(listed.split()).rstrip(".")) from None
    for key, value in buffers.items():
        if key not in own:
            raise _misfit(name, f"it has no buffer {key}")
        own[key].copy_(value)


@contextmanager
def _naming_misfits(name: str) -> Iterator[None]:
    """Report in one line that what a checkpoint holds under this name cannot be loaded: its content is not trusted."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise _misfit(name, " ".join(f"{type(error).__name__}: {error}".split())) from error


def _misfit(name: str, problem: str) -> UserError:
    cut = problem[:_MAX_PROBLEM] + "…" * (len(problem) > _MAX_PROBLEM)
    return UserError(f"the checkpoint does not fit {name}: {cut}: build the same model, or choose another folder")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
