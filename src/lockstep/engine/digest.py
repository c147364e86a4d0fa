"""Digests: one sha256 for the whole state of a run, so that two runs can be told apart by their bits.

It does not depend on the order of dictionaries, on the device or on the number of ranks.
"""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

State = Mapping[str, Tensor]


def state_of(
    models: Mapping[str, nn.Module],
    optimizers: Mapping[str, Optimizer] | None = None,
    others: Mapping[str, State] | None = None,
) -> dict[str, Tensor]:
    """Weights, buffers, optimizer state and `others`' tensors, each under a name that says what it is."""
    state: dict[str, Tensor] = {}
    for prefix, model in models.items():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if isinstance(tensor, Tensor):
                state[f"{prefix}/{name}"] = tensor.detach()
        for name, buffer in model.named_buffers(remove_duplicate=False):  # those that are not saved count too
            state[f"{prefix}/{name}"] = buffer.detach()
    for prefix, optimizer in (optimizers or {}).items():
        owners = {owner: optimizer.state.get(p, {}) for owner, p in owners_in(optimizer, models).items()}
        state |= flattened(prefix, owners)
    for prefix, tensors in (others or {}).items():
        state |= {f"{prefix}/{name}": tensor for name, tensor in tensors.items()}
    return state


def owners_in(optimizer: Optimizer, models: Mapping[str, nn.Module]) -> dict[str, Parameter]:
    """The optimizer's parameters by their models' names for them; one that no model has, by its number."""
    names: dict[int, str] = {}
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), f"{prefix}/{name}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {names.get(id(parameter), str(index)): parameter for index, parameter in enumerate(parameters)}


def flattened(prefix: str, owners: Mapping[str, Mapping[str, Any]]) -> dict[str, Tensor]:
    """An optimizer's state for each parameter, as tensors with names."""
    return {
        f"{prefix}/{owner}/{path}": tensor
        for owner, state in owners.items()
        for key, value in state.items()
        for path, tensor in tensors_in(value, key)
    }


def tensor_digests(state: State | Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """The sha256 of each tensor: its type, its shape and its bytes. One at a time may be there."""
    tensors = state.items() if isinstance(state, Mapping) else state
    return dict(sorted((name, _digest_tensor(tensor)) for name, tensor in tensors))


def digest(state: State | Iterable[tuple[str, Tensor]]) -> str:
    """One sha256 over all of them, in hex."""
    whole = hashlib.sha256()
    for name, tensor_digest in tensor_digests(state).items():
        whole.update(f"{name}\x00{tensor_digest}\n".encode())
    return whole.hexdigest()


def value_digest(value: Any) -> str:
    """The sha256 of a batch, whatever it is made of. Of an object of an unknown kind, the kind alone counts."""
    whole = hashlib.sha256()
    for piece in _spelled(value):
        whole.update(f"{piece}\n".encode())
    return whole.hexdigest()


def _spelled(value: Any) -> Iterator[str]:
    """A value as text that is the same in every process."""
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
            yield from _spelled(key)
            yield from _spelled(element)
    elif isinstance(value, Sequence):
        yield str(len(value))
        for element in value:
            yield from _spelled(element)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _spelled({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})


def _digest_tensor(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous()
    hashed = hashlib.sha256(f"{data.dtype} {tuple(data.shape)}\x00".encode())
    if data.numel():
        hashed.update(data.reshape(-1).view(torch.uint8).numpy().data)  # as bytes: numpy has no bfloat16
    return hashed.hexdigest()


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors and numbers in a nested value; numbers as tensors, because their bits count too."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, bool | int | float):
        yield path, torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from tensors_in(element, f"{path}.{key}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, element in enumerate(value):
            yield from tensors_in(element, f"{path}.{index}")
