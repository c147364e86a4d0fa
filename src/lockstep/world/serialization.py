"""Split nested Python values into JSON and tensors, and join them again: for checkpoints and for sending.

Values are None, booleans, numbers, strings, bytes, lists, tuples, dictionaries, tensors, numpy arrays and, in
checkpoints, shards of tensors. All of them come back unchanged, numbers to the last bit; tensors come back on the CPU,
and a shard as the full tensor. Nothing in the JSON form names code to run.
"""

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.errors import UserError

# A dictionary with one of these as its only key stands for a value that JSON does not have.
_TENSOR, _ARRAY, _TUPLE, _PAIRS, _FLOAT, _BYTES = "$tensor", "$array", "$tuple", "$pairs", "$float", "$bytes"

_MAX_DEPTH = 100  # far below Python's recursion limit: whatever was split can be joined again


class Shard(NamedTuple):
    """This rank's slice of a tensor that no rank holds in full; with a single offset, of the flattened tensor."""

    local: Tensor
    offsets: tuple[int, ...]  # where the slice begins in the full tensor
    shape: tuple[int, ...]  # of the full tensor


class SplitValue(NamedTuple):
    """A value as JSON, and the tensors and shards that the JSON refers to by name."""

    form: Any  # what `json.dumps` takes
    tensors: dict[str, Tensor]
    shards: dict[str, Shard]


def split_values(value: Any, place: str = "value") -> SplitValue:
    """Split a value into JSON and tensors. A UserError says what cannot be saved or sent; `place` names the value."""
    tensors: dict[str, Any] = {}
    form = _split(value, place, (), tensors)
    shards = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, Shard)}
    return SplitValue(form, {name: tensor for name, tensor in tensors.items() if name not in shards}, shards)


def join_values(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value again. Raises ValueError for a form that `split_values` cannot have made."""
    try:
        return _join(form, tensors)
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"damaged: it does not describe the saved values: {repr(error)[:200]}") from None


def cpu_copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares no memory, as safetensors needs it."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _split(value: Any, place: str, path: tuple[str, ...], tensors: dict[str, Any]) -> Any:
    def inner(element: Any, key: Any) -> Any:
        return _split(element, f"{place}[{key!r}]", (*path, str(key)), tensors)

    if len(path) > _MAX_DEPTH:
        raise UserError(f"{place[:80]}… is nested more than {_MAX_DEPTH} deep")
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(float(value))}
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta and not value.is_quantized:
        return {_TENSOR: _add(value.detach(), path, tensors)}
    if isinstance(value, Shard):
        return {_TENSOR: _add(value, path, tensors)}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {_ARRAY: _add(torch.from_numpy(value.copy()), path, tensors)}
    if isinstance(value, np.generic) and not isinstance(value.item(), np.generic):  # a long double is its own item
        return _split(value.item(), place, path, tensors)
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, tuple):
        return {_TUPLE: [inner(element, index) for index, element in enumerate(value)]}
    if isinstance(value, list):
        return [inner(element, index) for index, element in enumerate(value)]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: inner(element, key) for key, element in value.items()}
        return {_PAIRS: [[inner(key, "key"), inner(element, key)] for key, element in value.items()]}
    raise UserError(
        f"{place} has the type {type(value).__name__}: only None, booleans, numbers, strings, bytes, lists, tuples, "
        "dictionaries, dense tensors and numpy arrays can be sent or saved"
    )


def _add(tensor: Tensor | Shard, path: tuple[str, ...], tensors: dict[str, Any]) -> str:
    """Store a tensor under its path, or under a similar name if that one is taken; return the name."""
    name = "/".join(path) or "value"
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def _join(form: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(form, list):
        return _joined(form, tensors)
    if not isinstance(form, dict):
        return form
    marks = [key for key in form if key.startswith("$")]
    if marks:
        ((key, content),) = form.items()  # the only key: a user's dictionary with such a key is split into pairs
        return _MARKED[key](content, tensors)
    return {key: _join(element, tensors) for key, element in form.items()}


def _joined(elements: Any, tensors: Mapping[str, Tensor]) -> list[Any]:
    if not isinstance(elements, list):
        raise TypeError(f"expected a list, got a {type(elements).__name__}")
    return [_join(element, tensors) for element in elements]


def _dictionary(pairs: list[Any]) -> dict[Any, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a key appears twice")
    return content


_MARKED: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    _TENSOR: lambda name, tensors: tensors[name],
    _ARRAY: lambda name, tensors: tensors[name].numpy(),
    _TUPLE: lambda elements, tensors: tuple(_joined(elements, tensors)),
    _PAIRS: lambda pairs, tensors: _dictionary(_joined(pairs, tensors)),
    _FLOAT: lambda text, _tensors: float(text),
    _BYTES: lambda text, _tensors: base64.b64decode(text, validate=True),
}
