"""Buffers that a forward pass changes: each lane starts from the step's first values, and the lanes' are combined.

Batch-norm statistics are averaged over lanes, weighted by their samples; counters advance once a step. How any other
buffer should be combined cannot be guessed, so a change to one is an error that names it and the setting.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from lockstep.data.lanes import Lanes
from lockstep.engine.channel import Channel
from lockstep.engine.exchange import Exchange
from lockstep.engine.tree import TreeSum, leaf
from lockstep.errors import UserError

Rule = Literal["mean", "first", "max"]
RULES: tuple[Rule, ...] = ("mean", "first", "max")

# A change made through `.data` leaves no trace on the tensor, so every so often the values themselves are compared.
# Odd, so that a step of two passes has both of them compared.
_COMPARE_EVERY = 49


class Slot(NamedTuple):
    """Where a module keeps a buffer; the tensor there may be replaced by another."""

    name: str
    module: nn.Module
    key: str

    @property
    def is_empty(self) -> bool:
        return self.module._buffers[self.key] is None

    @property
    def tensor(self) -> Tensor:
        tensor = self.module._buffers[self.key]
        assert tensor is not None
        return tensor

    @property
    def version(self) -> tuple[Tensor | None, int]:
        """Which tensor it is, and how often it has been changed in place."""
        tensor = self.module._buffers[self.key]
        return tensor, 0 if tensor is None else tensor._version


class LaneBuffers:
    """The buffers of some modules over the lanes of one step: `open_lane`, `close_lane`, …, `exchange`, `finish`."""

    def __init__(self, modules: Iterable[nn.Module], rules: Mapping[str, Rule]) -> None:
        self._slots: dict[Rule, list[Slot]] = {rule: [] for rule in RULES}
        self._fixed: list[Slot] = []  # not to be changed
        unmatched = set(rules)
        for slot in slots_of(modules):
            pattern = next((pattern for pattern in rules if fnmatchcase(slot.name, pattern)), None)
            unmatched.discard(pattern or "")
            rule = _own_rule(slot) if pattern is None else rules[pattern]
            if rule == "mean" and not slot.tensor.is_floating_point():
                raise UserError(f"buffers: {slot.name} holds {slot.tensor.dtype}, which has no mean: use first or max")
            (self._fixed if rule is None else self._slots[rule]).append(slot)
        if unmatched:
            raise UserError(f"buffers: {sorted(unmatched)[0]!r} matches no buffer of the model")
        self._managed = [slot for slots in self._slots.values() for slot in slots]
        self._versions: list[tuple[Tensor | None, int]] = []
        self._is_changed = False
        self._passes = 0

    @property
    def any_managed(self) -> bool:
        return bool(self._managed)

    def begin(self) -> None:
        """A step begins: remember the values every lane is to start from."""
        if not (self._managed or self._fixed):
            return
        self._base = {slot: slot.tensor.clone() for slot in self._managed}
        self._is_changed = False
        self._means: TreeSum[Tensor] = TreeSum(Tensor.add_)
        self._maxima: list[Tensor] | None = None
        self._first: list[Tensor] | None = None
        self._versions = [slot.version for slot in self._fixed]
        is_due = self._passes < 2 or self._passes % _COMPARE_EVERY == 0
        self._copies = [None if slot.is_empty else slot.tensor.clone() for slot in self._fixed] if is_due else []
        self._passes += 1

    def open_lane(self) -> None:
        if self._is_changed:
            for slot in self._managed:
                slot.tensor.copy_(self._base[slot])

    def close_lane(self, lane: int, size: int) -> None:
        """Take in what the lane has left; an empty lane adds nothing."""
        if not self._managed:
            return
        if self._slots["mean"]:
            self._means.push(leaf(lane), self._weighted_change(size))
        if size == 0:
            return
        self._is_changed = True
        if self._slots["max"]:
            values = [_widest(slot.tensor) for slot in self._slots["max"]]
            self._maxima = values if self._maxima is None else list(map(torch.maximum, self._maxima, values))
        if self._slots["first"] and self._first is None:
            self._first = [slot.tensor.clone() for slot in self._slots["first"]]

    def check(self) -> None:
        """All lanes are done: none may have touched a buffer for which there is no rule."""
        if not self._fixed:
            return
        for number, (slot, (tensor, version)) in enumerate(zip(self._fixed, self._versions, strict=True)):
            before = self._copies[number] if self._copies else None
            now, now_version = slot.version
            same = now is tensor and now_version == version
            if not same or (before is not None and not torch.equal(slot.tensor, before)):
                raise UserError(
                    f"the forward pass changes the buffer {slot.name}: say how lanes are to be combined, "
                    f"buffers={{{slot.name!r}: 'mean' | 'first' | 'max'}}"
                )

    def exchange(self, channel: Channel, exchange: Exchange, lanes: Lanes, sizes: Sequence[int]) -> None:
        """Combine with the other ranks' lanes, on the channel's thread; then write the result."""
        if self._slots["mean"]:
            parts = [part.to(channel.carrier) for _, part in self._means]
            self._set_means(exchange.sum(parts, _nothing))
        for index, slot in enumerate(self._slots["max"]):
            lowest = _lowest(slot.tensor) if self._maxima is None else self._maxima[index]
            shared = lowest.to(channel.carrier)
            dist.all_reduce(shared, dist.ReduceOp.MAX, channel.group)
            slot.tensor.copy_(shared)
        owner = lanes.owner(next(lane for lane, size in enumerate(sizes) if size))
        for index, slot in enumerate(self._slots["first"]):
            value = slot.tensor if self._first is None else self._first[index]
            shared = value.to(channel.carrier)
            dist.broadcast(shared, owner, channel.group)
            slot.tensor.copy_(shared)

    def combine(self) -> None:
        """The same with all lanes on this rank."""
        if not self._managed:
            return
        if self._slots["mean"]:
            self._set_means(self._means.total())
        for index, slot in enumerate(self._slots["max"]):
            if self._maxima is not None:
                slot.tensor.copy_(self._maxima[index])
        for index, slot in enumerate(self._slots["first"]):
            if self._first is not None:
                slot.tensor.copy_(self._first[index])

    def _weighted_change(self, size: int) -> Tensor:
        """(change · size) of every averaged buffer, and the size itself: summed over lanes, their quotient is the mean.

        The change and not the value: what no lane changed stays exactly as it was.
        """
        slots = self._slots["mean"]
        changes = [
            (slot.tensor - self._base[slot]).double().reshape(-1) if size else _zeros(slot.tensor) for slot in slots
        ]
        return torch.cat([*changes, torch.ones(1, dtype=torch.float64, device=changes[0].device)]).mul_(size)

    def _set_means(self, summed: Tensor) -> None:
        mean_change = summed[:-1] / summed[-1]
        offset = 0
        for slot in self._slots["mean"]:
            tensor, length = slot.tensor, slot.tensor.numel()
            change = mean_change[offset : offset + length].view_as(tensor).to(tensor.device)
            tensor.copy_(self._base[slot].double() + change)
            offset += length


def slots_of(modules: Iterable[nn.Module]) -> Iterable[Slot]:
    """Each once, where modules share some."""
    seen = set()
    for root in modules:
        for path, module in root.named_modules():
            for key in module._buffers:
                if (id(module), key) not in seen:
                    seen.add((id(module), key))
                    yield Slot(f"{path}.{key}" if path else key, module, key)


def _own_rule(slot: Slot) -> Rule | None:
    if slot.is_empty:
        return None
    if isinstance(slot.module, _NormBase) and slot.key in ("running_mean", "running_var"):
        return "mean"
    is_counter = slot.tensor.numel() == 1 and not slot.tensor.is_floating_point() and slot.tensor.dtype != torch.bool
    return "max" if is_counter else None


def _widest(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64, copy=True)


def _lowest(tensor: Tensor) -> Tensor:
    """What never is the maximum: the part of a rank that had no sample."""
    wide = _widest(tensor)
    return wide.fill_(-torch.inf if wide.is_floating_point() else torch.iinfo(torch.int64).min)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.numel(), dtype=torch.float64, device=tensor.device)


def _nothing(_summed: Tensor, _start: int) -> None:
    pass
