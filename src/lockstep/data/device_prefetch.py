"""Move batches to the device: on CUDA through pinned memory, on a separate stream, one global batch ahead.

On the CPU nothing is copied: batches are passed on unchanged.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=tuple[Any, ...])


def prefetch_to_device(batches: Generator[T, None, None], device: torch.device, ahead: bool = True) -> Iterator[T]:
    """The same batches with every tensor on `device`.

    Args:
        batches: the batches to move; closed when the result is.
        device: where to move them.
        ahead: on CUDA, start the copy of the next batch before a batch is yielded.
    """
    if device.type == "cpu":
        return batches
    if device.type != "cuda":
        return _move_each(batches, device)
    return _copy_on_stream(batches, device, ahead)


def to_device(value: Any, device: torch.device, pin: bool = False) -> Any:
    """`value` with every tensor on `device`: in lists, tuples, mappings, dataclasses, and objects with a `.to`."""
    if isinstance(value, Tensor):
        if pin and value.device.type == "cpu" and value.layout is torch.strided and not value.is_pinned():
            value = value.pin_memory()
        return value.to(device, non_blocking=pin)  # from unpinned memory this would not be safe everywhere
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if hasattr(value, "to"):  # before tuples: torch's PackedSequence is one, and keeps a part of it on the CPU
        return _call_to(value, device, pin)
    if isinstance(value, tuple) and hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(to_device(element, device, pin) for element in value))
    if isinstance(value, list | tuple):
        return type(value)(to_device(element, device, pin) for element in value)
    if isinstance(value, Mapping):
        elements = {key: to_device(element, device, pin) for key, element in value.items()}
        return elements if type(value) is dict else _rebuilt(value, elements)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: to_device(getattr(value, name), device, pin) for name in fields})
    return value


def _call_to(value: Any, device: torch.device, pin: bool) -> Any:
    if not pin:
        return value.to(device)
    value = value.pin_memory() if hasattr(value, "pin_memory") else value
    try:
        return value.to(device, non_blocking=True)
    except TypeError:  # not every `.to` has torch's full signature
        return value.to(device)


def _rebuilt(original: Mapping[Any, Any], elements: dict[Any, Any]) -> Any:
    try:
        return type(original)(elements)  # type: ignore[call-arg]
    except TypeError:  # a mapping with another constructor, such as defaultdict
        return elements


def _move_each(batches: Generator[T, None, None], device: torch.device) -> Iterator[T]:
    try:
        for batch in batches:
            yield to_device(batch, device)
    finally:
        batches.close()


class _Sent(NamedTuple):
    """A batch on the device, and the event that its copy is complete."""

    batch: Any
    arrival: torch.cuda.Event


def _copy_on_stream(batches: Generator[T, None, None], device: torch.device, ahead: bool) -> Iterator[T]:
    """Copy the next batch on a separate stream while the consumer computes on this one.

    The memory of a copy belongs to the copying stream, so the allocator would give it to the next copy as soon as the
    consumer drops it, while the consumer's kernels may still read it. `record_stream` would prevent that for tensors,
    but not for those inside objects with their own `.to`; so each copy first waits for what the consumer has enqueued
    so far. With one batch ahead, that is only the work before the current batch, so no overlap is lost.
    """
    copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(batch: T) -> _Sent:
        copy_stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copy_stream):
            sent = to_device(batch, device, pin=True)
            return _Sent(sent, copy_stream.record_event())

    def receive(sent: _Sent) -> Any:
        torch.cuda.current_stream(device).wait_event(sent.arrival)
        return sent.batch

    try:
        yield from _pipelined(map(send, batches), ahead, receive)
    finally:
        batches.close()


def _pipelined(sent: Iterable[_Sent], ahead: bool, receive: Callable[[_Sent], Any]) -> Iterator[Any]:
    """Receive each batch; if `ahead`, only after the next one has been sent."""
    waiting: _Sent | None = None
    for following in sent:
        if waiting is not None:
            yield receive(waiting)
        waiting = following
        if not ahead:
            yield receive(waiting)
            waiting = None
    if waiting is not None:
        yield receive(waiting)
