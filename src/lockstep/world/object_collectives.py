"""Collectives on Python values (broadcast_object, gather_object, …) as JSON and tensors; and shared counters.

Values are bounded in size and never pickled: a received pickle could run code, and what arrives here is parsed as data
only. `serialization.py` says which values can be sent.
"""

import json
from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch import Tensor

from lockstep.errors import UserError
from lockstep.events.jsonl import parse_json
from lockstep.world.collectives import broadcast, get_rank, get_world_size
from lockstep.world.serialization import cpu_copy, join_values, split_values
from lockstep.world.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, Store  # the stubs of torch.distributed lack them
else:
    from torch.distributed import PrefixStore, Store

MAX_OBJECT_BYTES = 256 * 2**20

# A packet's entries: the JSON form of the value, and its tensors, each name with this prefix.
_FORM, _TENSOR = "form", "tensor:"

_counter_sets = count()  # numbers the `SharedCounters`; rank 0's number counts, as the others' may differ


def broadcast_object(
    value: Any = None, src: int = 0, max_bytes: int = MAX_OBJECT_BYTES, group: dist.ProcessGroup | None = None
) -> Any:
    """Return the value of rank `src` on every process.

    Args:
        value: the value to send; ignored on the other ranks.
        src: the rank that sends.
        max_bytes: the largest size of the encoded value; a larger one is a `UserError`.
        group: the process group; the default one if omitted.
    """
    if get_world_size(group) == 1:
        return decode_value(encode_value(value, max_bytes), max_bytes)
    packet = encode_value(value, max_bytes) if get_rank(group) == src else torch.empty(0, dtype=torch.uint8)
    size = broadcast(torch.tensor([packet.numel()], device=_backend_device(group)), src, group)
    buffer = _padded(packet, _checked_size(int(size), max_bytes), group)
    return decode_value(broadcast(buffer, src, group), max_bytes)


def broadcast_value(value: Any = None) -> Any:
    """Return rank 0's value on every process. Its size is not limited, because its tensors are sent separately."""
    if get_world_size() == 1:
        return value
    form, tensors, _ = split_values(value)
    kinds = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
    form, kinds = broadcast_object((form, kinds))
    received = {}
    for name, (dtype, shape) in kinds.items():
        tensor = tensors[name] if get_rank() == 0 else torch.empty(shape, dtype=getattr(torch, dtype))
        received[name] = _broadcast_bytes(tensor)
    return join_values(form, received)


def all_gather_object(
    value: Any, max_bytes: int = MAX_OBJECT_BYTES, group: dist.ProcessGroup | None = None
) -> list[Any]:
    """Return every process's value in rank order, on every process.

    Args:
        value: this process's value.
        max_bytes: the largest size of one encoded value; a larger one is a `UserError`.
        group: the process group; the default one if omitted.
    """
    packet = encode_value(value, max_bytes)
    if get_world_size(group) == 1:
        return [decode_value(packet, max_bytes)]
    sizes = _gathered_sizes(packet, max_bytes, group)
    buffer = _padded(packet, max(sizes), group)
    packets = [torch.empty_like(buffer) for _ in sizes]
    dist.all_gather(packets, buffer, group)
    return [decode_value(packet[:size], max_bytes) for packet, size in zip(packets, sizes, strict=True)]


def gather_object(value: Any, dst: int = 0, max_bytes: int = MAX_OBJECT_BYTES) -> list[Any] | None:
    """Return every process's value in rank order on rank `dst`, and None on the others.

    Args:
        value: this process's value.
        dst: the rank that receives.
        max_bytes: the largest size of one encoded value; a larger one is a `UserError`.
    """
    packet = encode_value(value, max_bytes)
    if get_world_size() == 1:
        return [decode_value(packet, max_bytes)]
    sizes = _gathered_sizes(packet, max_bytes)
    buffer = _padded(packet, max(sizes))
    packets = [torch.empty_like(buffer) for _ in sizes] if get_rank() == dst else None
    dist.gather(buffer, packets, dst)
    if packets is None:
        return None
    return [decode_value(packet[:size], max_bytes) for packet, size in zip(packets, sizes, strict=True)]


def scatter_object(values: Sequence[Any] | None = None, src: int = 0, max_bytes: int = MAX_OBJECT_BYTES) -> Any:
    """Return this rank's element of the `values` on rank `src`.

    Args:
        values: one value per process, on rank `src`; ignored on the others.
        src: the rank that sends.
        max_bytes: the largest size of one encoded value; a larger one is a `UserError`.
    """
    packets: list[Tensor] = []
    if get_rank() == src:
        if values is None or len(values) != get_world_size():
            raise UserError(
                f"scatter_object needs one value per process: expected {get_world_size()}, got {len(values or ())}"
            )
        packets = [encode_value(value, max_bytes) for value in values]
    if get_world_size() == 1:
        return decode_value(packets[0], max_bytes)
    sizes = torch.tensor([packet.numel() for packet in packets] or [0] * get_world_size(), device=_backend_device())
    lengths = [_checked_size(int(size), max_bytes) for size in broadcast(sizes, src)]
    received = _padded(torch.empty(0, dtype=torch.uint8), max(lengths))
    dist.scatter(received, [_padded(packet, max(lengths)) for packet in packets] or None, src)
    return decode_value(received[: lengths[get_rank()]], max_bytes)


class SharedCounters:
    """Counters by name, each from 0, that every rank can add to without waiting for the others.

    Ranks can use one to take pieces of work. All ranks must create it together.
    """

    def __init__(self, world: World) -> None:
        number = broadcast_object(next(_counter_sets))
        self._local: dict[str, int] = {}
        self._store: Store | None = None
        group = dist.group.WORLD
        if world.size > 1 and group is not None:
            self._store = PrefixStore(f"counters/{number}", group.get_group_store())

    def add(self, name: str, amount: int = 1) -> int:
        """Add to a counter and return its new value over all ranks."""
        if self._store is not None:
            return int(self._store.add(name, amount))
        self._local[name] = self._local.get(name, 0) + amount
        return self._local[name]

    def read(self, name: str) -> int:
        """Return a counter's value over all ranks. Polling this costs no memory, as `add(name, 0)` would."""
        if self._store is not None:
            return int(self._store.get(name)) if self._store.check([name]) else 0
        return self._local.get(name, 0)

    def forget(self, name: str) -> None:
        """Delete a counter that no rank will use again; one rank does this for all."""
        if self._store is not None:
            self._store.delete_key(name)
        self._local.pop(name, None)


def encode_value(value: Any, max_bytes: int = MAX_OBJECT_BYTES) -> Tensor:
    """A value as bytes: its JSON form and its tensors in one safetensors file."""
    form, tensors, shards = split_values(value)
    if shards:
        raise UserError("a shard of a tensor can be saved but not sent: gather the full tensor first")
    entries = {_TENSOR + name: cpu_copy(tensor) for name, tensor in tensors.items()}
    data = save(entries | {_FORM: torch.frombuffer(bytearray(json.dumps(form).encode()), dtype=torch.uint8)})
    _checked_size(len(data), max_bytes)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decode_value(packet: Tensor, max_bytes: int = MAX_OBJECT_BYTES) -> Any:
    """The value that `encode_value` turned into these bytes."""
    _checked_size(packet.numel(), max_bytes)
    tensors = load(packet.cpu().numpy().tobytes())
    form = parse_json(tensors.pop(_FORM).numpy().tobytes())
    return join_values(form, {name.removeprefix(_TENSOR): tensor for name, tensor in tensors.items()})


def _broadcast_bytes(tensor: Tensor) -> Tensor:
    """Broadcast rank 0's tensor as bytes, because a backend need not support every dtype."""
    if not tensor.numel():
        return tensor.cpu()
    buffer = tensor.detach().to(_backend_device()).contiguous().reshape(-1).view(torch.uint8)
    return broadcast(buffer).cpu().view(tensor.dtype).view(tensor.shape)


def _gathered_sizes(packet: Tensor, max_bytes: int, group: dist.ProcessGroup | None = None) -> list[int]:
    size = torch.tensor([packet.numel()], device=_backend_device(group))
    sizes = [torch.empty_like(size) for _ in range(get_world_size(group))]
    dist.all_gather(sizes, size, group)
    return [_checked_size(int(size), max_bytes) for size in sizes]


def _checked_size(num_bytes: int, max_bytes: int) -> int:
    if num_bytes > max_bytes:
        raise UserError(f"a value of {num_bytes:,} bytes is over the limit of {max_bytes:,}: raise max_bytes")
    return num_bytes


def _padded(packet: Tensor, num_bytes: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """The packet, padded to `num_bytes` on a device that the backend can send from."""
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=_backend_device(group))
    buffer[: packet.numel()] = packet.to(buffer.device)
    return buffer


def _backend_device(group: dist.ProcessGroup | None = None) -> torch.device:
    if dist.is_initialized() and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
