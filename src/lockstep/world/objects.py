"""Sending plain values between processes: JSON and tensors, bounded in size, never pickle.

A received pickle can run code; what arrives here is parsed as data alone. `plain_values` says what can be sent.
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
from lockstep.world.plain_values import join, own_copy, split

MAX_BYTES = 256 * 2**20

# A packet's entries: the form of the value, and its tensors under their names with this before them.
_FORM, _TENSOR = "form", "tensor:"


def broadcast_object(
    value: Any = None, src: int = 0, max_bytes: int = MAX_BYTES, group: dist.ProcessGroup | None = None
) -> Any:
    """`src`'s value, on every process. Others' arguments are ignored."""
    if get_world_size(group) == 1:
        return decode(encode(value, max_bytes), max_bytes)
    packet = encode(value, max_bytes) if get_rank(group) == src else torch.empty(0, dtype=torch.uint8)
    size = broadcast(torch.tensor([packet.numel()], device=_carrier_device(group)), src, group)
    carrier = _carrier(packet, _checked_size(int(size), max_bytes), group)
    return decode(broadcast(carrier, src, group), max_bytes)


def broadcast_value(value: Any = None) -> Any:
    """Rank 0's value, on every process: one of any size, since its tensors travel by themselves."""
    if get_world_size() == 1:
        return value
    form, tensors, _ = split(value)
    kinds = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
    form, kinds = broadcast_object((form, kinds))
    received = {}
    for name, (dtype, shape) in kinds.items():
        tensor = tensors[name] if get_rank() == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
        received[name] = _broadcast_bytes(tensor)
    return join(form, received)


def all_gather_object(value: Any, max_bytes: int = MAX_BYTES, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every process's value in rank order, on every process."""
    packet = encode(value, max_bytes)
    if get_world_size(group) == 1:
        return [decode(packet, max_bytes)]
    sizes = _gathered_sizes(packet, max_bytes, group)
    carrier = _carrier(packet, max(sizes), group)
    packets = [torch.empty_like(carrier) for _ in sizes]
    dist.all_gather(packets, carrier, group)
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
    """A value as bytes: its form and its tensors in one safetensors file."""
    form, tensors, shards = split(value)
    if shards:
        raise TypeError("a shard of a tensor can be saved, but not sent")
    entries = {_TENSOR + name: own_copy(tensor) for name, tensor in tensors.items()}
    data = save(entries | {_FORM: torch.frombuffer(bytearray(json.dumps(form).encode()), dtype=torch.uint8)})
    _checked_size(len(data), max_bytes)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode(packet: Tensor, max_bytes: int = MAX_BYTES) -> Any:
    _checked_size(packet.numel(), max_bytes)
    tensors = load(packet.cpu().numpy().tobytes())
    form = parse_json(tensors.pop(_FORM).numpy().tobytes())
    return join(form, {name.removeprefix(_TENSOR): tensor for name, tensor in tensors.items()})


def _broadcast_bytes(tensor: Tensor) -> Tensor:
    """As bytes: a backend need not know every type."""
    if not tensor.numel():
        return tensor.cpu()
    carrier = tensor.detach().to(_carrier_device()).contiguous().reshape(-1).view(torch.uint8)
    return broadcast(carrier).cpu().view(tensor.dtype).view(tensor.shape)


def _gathered_sizes(packet: Tensor, max_bytes: int, group: dist.ProcessGroup | None = None) -> list[int]:
    size = torch.tensor([packet.numel()], device=_carrier_device(group))
    sizes = [torch.empty_like(size) for _ in range(get_world_size(group))]
    dist.all_gather(sizes, size, group)
    return [_checked_size(int(size), max_bytes) for size in sizes]


def _checked_size(num_bytes: int, max_bytes: int) -> int:
    if num_bytes > max_bytes:
        raise ValueError(f"a value of {num_bytes:,} bytes is over the limit of {max_bytes:,}: raise max_bytes")
    return num_bytes


def _carrier(packet: Tensor, num_bytes: int, group: dist.ProcessGroup | None = None) -> Tensor:
    carrier = torch.zeros(num_bytes, dtype=torch.uint8, device=_carrier_device(group))
    carrier[: packet.numel()] = packet.to(carrier.device)
    return carrier


def _carrier_device(group: dist.ProcessGroup | None = None) -> torch.device:
    if dist.is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
