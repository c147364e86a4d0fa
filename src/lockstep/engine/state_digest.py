"""SHA-256 digests of a run's state, to compare runs bit by bit; and the trace of every step's digests.

A digest does not depend on the order of dictionaries, on the device or on the number of ranks.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from lockstep.data.lanes import GlobalBatch
from lockstep.engine.compiled_models import named_buffers, named_parameters, state_by_name
from lockstep.events.jsonl import JsonlWriter
from lockstep.events.step_trace import TRACE_PHASES, Phases
from lockstep.world.object_collectives import all_gather_object

StateTensors = Mapping[str, Tensor]

_TRACE_DIGITS = 16  # 64 bits are enough to tell two tensors apart, and a trace has a line for every step
_NO_GRADIENT = "none"


def state_of(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer] | None = None,
    others: Mapping[str, StateTensors] | None = None,
) -> dict[str, Tensor]:
    """Return weights, buffers and optimizer state as tensors by name, for `digest`.

    Args:
        models: each model by the name that its tensors' names begin with, as in `model/fc.weight`.
        optimizers: optimizers of these models, by name.
        others: more tensors, by group and name.
    """
    state: dict[str, Tensor] = {}
    for prefix, model in models.items():
        for name, tensor in state_by_name(model, keep_vars=True).items():
            if isinstance(tensor, Tensor):
                state[f"{prefix}/{name}"] = tensor.detach()
        for name, buffer in named_buffers(model):
            state[f"{prefix}/{name}"] = buffer.detach()
    for prefix, optimizer in (optimizers or {}).items():
        owners = {owner: optimizer.state.get(p, {}) for owner, p in parameters_by_name(optimizer, models).items()}
        state |= flatten_optimizer_state(prefix, owners)
    for prefix, tensors in (others or {}).items():
        state |= {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}
    return state


def parameters_by_name(optimizer: Optimizer, models: Mapping[str, nn.Module]) -> dict[str, Parameter]:
    """Return an optimizer's parameters by their names in the models; one that no model has, by its number."""
    names: dict[int, str] = {}
    for prefix, model in models.items():
        for name, parameter in named_parameters(model):
            names.setdefault(id(parameter), f"{prefix}/{name}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names.get(id(parameter), str(index)): parameter for index, parameter in enumerate(parameters)}


def flatten_optimizer_state(prefix: str, owners: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """Return an optimizer's state of each parameter as tensors with names."""
    return {
        f"{prefix}/{owner}/{path}": tensor
        for owner, state in owners.items()
        for key, value in state.items()
        for path, tensor in named_tensors(value, key)
    }


def tensor_digests(state: StateTensors | Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Return the SHA-256 of each tensor's dtype, shape and bytes. An iterable may make one tensor at a time."""
    tensors = state.items() if isinstance(state, Mapping) else state
    return dict(sorted((name, _digest_tensor(tensor)) for name, tensor in tensors))


def digest(state: StateTensors | Iterable[tuple[str, Tensor]]) -> str:
    """Return one SHA-256 over all tensors of a state, in hex: equal digests mean equal bits.

    `state`: the tensors by name.
    """
    whole = hashlib.sha256()
    for name, tensor_digest in tensor_digests(state).items():
        whole.update(f"{name}\x00{tensor_digest}\n".encode(errors="surrogatepass"))  # names may come from a file
    return whole.hexdigest()


def value_digest(value: Any) -> str:
    """Return the SHA-256 of a batch, whatever it is made of. Of objects of unknown types, only the type counts."""
    whole = hashlib.sha256()
    for piece in _as_text(value):
        whole.update(f"{piece}\n".encode())
    return whole.hexdigest()


def _as_text(value: Any) -> Iterator[str]:
    """Yield a value as text that is the same in every process."""
    yield type(value).__name__
    if isinstance(value, Tensor):
        yield _digest_tensor(value if value.layout is torch.strided else value.to_dense())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield f"{value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        yield repr(value)
    elif isinstance(value, Mapping):
        yield str(len(value))
        for key, element in value.items():
            yield from _as_text(key)
            yield from _as_text(element)
    elif isinstance(value, Sequence):
        yield str(len(value))
        for element in value:
            yield from _as_text(element)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _as_text({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})


def _digest_tensor(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    hashed = hashlib.sha256(f"{data.dtype} {tuple(data.shape)}\x00".encode())
    if data.numel():
        hashed.update(data.reshape(-1).view(torch.uint8).numpy().data)  # as bytes: numpy has no bfloat16
    return hashed.hexdigest()


def named_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and numbers in a nested value; numbers as tensors, because their bits count too."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, bool | int | float):
        yield path, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from named_tensors(element, f"{path}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, element in enumerate(value):
            yield from named_tensors(element, f"{path}.{index}")


class DigestTrace:
    """Writes a trace: after each step, the digests of its data, loss and gradients, and of the state it leaves.

    The text is the same on any number of ranks, as long as they compute the same bits; `first_difference` finds where
    two traces differ. Every rank has a trace, and they record each step together; the rank with a path writes.
    """

    def __init__(self, path: Path | None) -> None:
        self._lines = None if path is None else JsonlWriter(path)
        self._data: dict[str, str] = {}

    def begin(self, batch: GlobalBatch) -> None:
        """Digest a step's data before the script can change it in place."""
        self._data = {
            f"lane {lane.lane}": value_digest((lane.data, lane.weight))[:_TRACE_DIGITS] for lane in batch.lanes
        }

    def record(self, step: int, loss: float, gradients: Mapping[str, Tensor | None], state: StateTensors) -> None:
        """Record a step. `gradients`: as the optimizers saw them. Every rank must call it."""
        used = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        own: Phases = {
            "data": self._data,
            "loss": {"loss": repr(loss)},
            "gradient": dict.fromkeys(gradients, _NO_GRADIENT) | _short_digests(used),
            "state": _short_digests(state),
        }
        phases = _merge_ranks(all_gather_object(own))
        if self._lines is not None:
            self._lines.emit({"step": step, "phases": phases})

    def record_state(self, number: int, state: StateTensors) -> None:
        """Record the state after a round, which has no gradients. Every rank must call it."""
        phases = _merge_ranks(all_gather_object({"state": _short_digests(state)}))
        if self._lines is not None:
            self._lines.emit({"step": number, "phases": phases})

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()


def _short_digests(state: StateTensors) -> dict[str, str]:
    digests = tensor_digests(state)
    return {name: digests[name][:_TRACE_DIGITS] for name in state}  # in the model's own order


def _merge_ranks(ranks: Sequence[Phases]) -> Phases:
    """Merge what the ranks recorded. Where ranks differ, all their values are kept, so that no other trace is equal."""
    merged: Phases = {}
    for phase in (phase for phase in TRACE_PHASES if phase in ranks[0]):
        values: dict[str, dict[str, None]] = {}
        for rank in ranks:
            for name, text in rank[phase].items():
                values.setdefault(name, {})[text] = None
        merged[phase] = {name: " ≠ ".join(texts) for name, texts in values.items()}
    return merged
