"""Sending plain values between processes: JSON and tensors, bounded in size, never pickle.

A received pickle can run code; what arrives here is parsed as data alone. Values are None, booleans, numbers, text,
lists, dictionaries with text keys, and tensors (which arrive on the CPU); tuples arrive as lists.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from lockstep.config.json_text import parse_json
from lockstep.world.collectives import broadcast, get_rank, get_world_size

MAX_BYTES = 256 * 2**20

# Stands for the i-th tensor in the JSON text; a user's dictionary with this key alone is refused.
_TENSOR_KEY = "$tensor"
_TEXT_NAME = "json"


def broadcast_object(value: Any = None, src: int = 0, max_bytes: int = MAX_BYTES) -> Any:
    """`src`'s value, on every process. Others' arguments are ignored."""
    if get_world_size() == 1:
        return decode(encode(value, max_bytes), max_bytes)
    packet = encode(value, max_bytes) if get_rank() == src else torch.empty(0, dtype=torch.uint8)
    size = broadcast(torch.tensor([packet.numel()], device=_carrier_device()), src)
    carrier = _carrier(packet, _checked_size(int(size), max_bytes))
    return decode(broadcast(carrier, src), max_bytes)


def all_gather_object(value: Any, max_bytes: int = MAX_BYTES) -> list[Any]:
    """Every process's value in rank order, on every process."""
    packet = encode(value, max_bytes)
    if get_world_size() == 1:
        return [decode(packet, max_bytes)]
    sizes = _gathered_sizes(packet, max_bytes)
    carrier = _carrier(packet, max(sizes))
    packets = [torch.empty_like(carrier) for _ in sizes]
    dist.all_gather(packets, carrier)
    return [decode(packet[:size], max_bytes) for packet, size in zip(packets, sizes, strict=True)]


def gather_object(value: Any, dst: int = 0, max_bytes: int = MAX_BYTES) -> list[Any] | None:
    """Every process's value in rank order on `dst`; None elsewhere."""
    packet = encode(value, max_bytes)
    if get_world_size() == 1:
        return [decode(packet, max_bytes)]
    sizes = _gathered_sizes(packet, max_bytes)
    carrier = _carrier(packet, max(sizes))
    packets = [torch.empty_like(carrier) for _ in sizes] if get_rank() == dst else None
    dist.gather(carrier, packets, dst)
    if packets is None:
        return None
    return [decode(packet[:size], max_bytes) for packet, size in zip(packets, sizes, strict=True)]


def scatter_object(values: Sequence[Any] | None = None, src: int = 0, max_bytes: int = MAX_BYTES) -> Any:
    """This rank's element of `src`'s `values`. Others pass nothing."""
    packets: list[Tensor] = []
    if get_rank() == src:
        if values is None or len(values) != get_world_size():
            raise ValueError(f"scatter_object needs one value per process: {get_world_size()}, not {len(values or ())}")
        packets = [encode(value, max_bytes) for value in values]
    if get_world_size() == 1:
        return decode(packets[0], max_bytes)
    sizes = torch.tensor([packet.numel() for packet in packets] or [0] * get_world_size(), device=_carrier_device())
    lengths = [_checked_size(int(size), max_bytes) for size in broadcast(sizes, src)]
    received = _carrier(torch.empty(0, dtype=torch.uint8), max(lengths))
    dist.scatter(received, [_carrier(packet, max(lengths)) for packet in packets] or None, src)
    return decode(received[: lengths[get_rank()]], max_bytes)


def encode(value: Any, max_bytes: int = MAX_BYTES) -> Tensor:
    """A value as bytes: its JSON text and its tensors in one safetensors file."""
    tensors: list[Tensor] = []
    text = json.dumps(_without_tensors(value, tensors, "value"))
    named = {str(index): tensor for index, tensor in enumerate(tensors)}
    data = save({**named, _TEXT_NAME: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)})
    _checked_size(len(data), max_bytes)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode(packet: Tensor, max_bytes: int = MAX_BYTES) -> Any:
    _checked_size(packet.numel(), max_bytes)
    tensors = load(packet.cpu().numpy().tobytes())
    return _with_tensors(parse_json(tensors[_TEXT_NAME].numpy().tobytes()), tensors)


def _without_tensors(value: Any, tensors: list[Tensor], place: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        # A copy of its own: tensors that share memory cannot be written apart.
        tensors.append(value.detach().cpu().clone(memory_format=torch.contiguous_format))
        return {_TENSOR_KEY: len(tensors) - 1}
    if isinstance(value, list | tuple):
        return [_without_tensors(element, tensors, f"{place}[{index}]") for index, element in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str) or key == _TENSOR_KEY:
                raise TypeError(f"{place} has the key {key!r}: expected text other than {_TENSOR_KEY!r}")
        return {key: _without_tensors(element, tensors, f"{place}[{key!r}]") for key, element in value.items()}
    raise TypeError(
        f"{place} is a {type(value).__name__}: only None, booleans, numbers, text, lists, dictionaries and tensors "
        "travel between processes"
    )


def _with_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_with_tensors(element, tensors) for element in value]
    if isinstance(value, dict):
        if value.keys() == {_TENSOR_KEY}:
            return tensors[str(value[_TENSOR_KEY])]
        return {key: _with_tensors(element, tensors) for key, element in value.items()}
    return value


def _gathered_sizes(packet: Tensor, max_bytes: int) -> list[int]:
    size = torch.tensor([packet.numel()], device=_carrier_device())
    sizes = [torch.empty_like(size) for _ in range(get_world_size())]
    dist.all_gather(sizes, size)
    return [_checked_size(int(size), max_bytes) for size in sizes]


def _checked_size(num_bytes: int, max_bytes: int) -> int:
    if num_bytes > max_bytes:
        raise ValueError(f"a value of {num_bytes:,} bytes is over the limit of {max_bytes:,}: raise max_bytes")
    return num_bytes


def _carrier(packet: Tensor, num_bytes: int) -> Tensor:
    carrier = torch.zeros(num_bytes, dtype=torch.uint8, device=_carrier_device())
    carrier[: packet.numel()] = packet.to(carrier.device)
    return carrier


def _carrier_device() -> torch.device:
    if dist.is_initialized() and dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
