"""Buffers that a forward pass changes, such as batch-norm statistics, and how lanes are combined.

Each lane starts from the values that the step began with. Batch-norm statistics are averaged over lanes, weighted by
their samples; counters advance once a step; spectral norm's vectors follow from the weights alone. How any other buffer
should be combined cannot be guessed, so a change to one is an error that names it and the setting.
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.lanes import Lanes
from lockstep.engine.comm_thread import CommThread
from lockstep.engine.compiled_models import named_modules
from lockstep.engine.lane_tree import TreeSum, leaf
from lockstep.engine.torch_internals import (
    buffer_names,
    get_buffer,
    has_running_statistics,
    set_buffer,
    singular_vectors,
    version_of,
)
from lockstep.engine.tree_all_reduce import TreeAllReduce
from lockstep.errors import UserError

BufferRule = Literal["mean", "first", "max"]
BUFFER_RULES: tuple[BufferRule, ...] = ("mean", "first", "max")

# A change made through `.data` does not change the tensor's version, so now and then the values are compared as well.
# The number of passes is odd: if every step has two passes, each of them has its turn.
_COMPARE_EVERY = 49


class BufferSlot(NamedTuple):
    """Where a module keeps a buffer: the tensor in it may be replaced by another."""

    name: str
    module: nn.Module
    key: str

    @property
    def is_empty(self) -> bool:
        return self.get() is None

    @property
    def tensor(self) -> Tensor:
        """The buffer, which must not be empty."""
        tensor = self.get()
        assert tensor is not None
        return tensor

    def get(self) -> Tensor | None:
        """Return the buffer; None if it is empty."""
        return get_buffer(self.module, self.key)

    def set(self, tensor: Tensor | None) -> None:
        """Put another tensor in the buffer's place."""
        set_buffer(self.module, self.key, tensor)

    @property
    def version(self) -> tuple[Tensor | None, int]:
        """Which tensor it is, and how often that was changed in place."""
        tensor = self.get()
        return tensor, 0 if tensor is None else version_of(tensor)


class LaneBuffers:
    """The buffers of some modules over the lanes of a pass.

    Call `begin`; for each lane `open_lane` and `close_lane`; `check`; then `combine` or `combine_over_ranks`.
    """

    def __init__(self, modules: Iterable[nn.Module], rules: Mapping[str, BufferRule]) -> None:
        self._slots: dict[BufferRule, list[BufferSlot]] = {rule: [] for rule in BUFFER_RULES}
        self._fixed: list[BufferSlot] = []  # buffers that no forward pass may change
        unmatched = set(rules)
        for slot in buffer_slots(modules):
            pattern = next((pattern for pattern in rules if fnmatchcase(slot.name, pattern)), None)
            unmatched.discard(pattern or "")
            rule = None if slot.is_empty else _default_rule(slot) if pattern is None else rules[pattern]
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
        """Whether any buffer is combined over lanes."""
        return bool(self._managed)

    def begin(self) -> None:
        """Start a pass: remember the values that every lane starts from."""
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
        """Put back the values that the pass began with."""
        if self._is_changed:
            for slot in self._managed:
                slot.tensor.copy_(self._base[slot])

    def close_lane(self, lane: int, size: int) -> None:
        """Add the values that the lane has left in the buffers. An empty lane adds nothing."""
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
        """After all lanes: raise if one has changed a buffer for which there is no rule."""
        if not self._fixed:
            return
        for number, (slot, (tensor, version)) in enumerate(zip(self._fixed, self._versions, strict=True)):
            before = self._copies[number] if self._copies else None
            now, now_version = slot.version
            same = now is tensor and now_version == version
            if now is not None and (tensor is None or now.shape != tensor.shape):
                raise new_buffer_error(slot.name)
            if not same or (before is not None and not torch.equal(slot.tensor, before)):
                raise UserError(
                    f"the forward pass changes the buffer {slot.name}: set how lanes are combined, "
                    f"buffers={{{slot.name!r}: 'mean' | 'first' | 'max'}}"
                )

    def combine_over_ranks(
        self, comm: CommThread, all_reduce: TreeAllReduce, lanes: Lanes, sizes: Sequence[int]
    ) -> None:
        """Combine the lanes of all ranks, and write the result. Runs on the communication thread.

        `sizes`: each lane's number of samples.
        """
        if self._slots["mean"]:
            partial_sums = [partial_sum.to(comm.device) for _, partial_sum in self._means]
            self._set_means(all_reduce.all_reduce(partial_sums, _keep_sum))
        for index, slot in enumerate(self._slots["max"]):
            lowest = _lowest(slot.tensor) if self._maxima is None else self._maxima[index]
            shared = lowest.to(comm.device)
            dist.all_reduce(shared, dist.ReduceOp.MAX, comm.group)
            slot.tensor.copy_(shared)
        owner = lanes.owner(next(lane for lane, size in enumerate(sizes) if size))
        for index, slot in enumerate(self._slots["first"]):
            value = slot.tensor if self._first is None else self._first[index]
            shared = value.to(comm.device)
            dist.broadcast(shared, owner, comm.group)
            slot.tensor.copy_(shared)

    def combine(self) -> None:
        """Combine the lanes, all of which are on this rank, and write the result."""
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
        """Return (change · size) of every averaged buffer, and the size: summed over lanes, their quotient is the mean.

        The change and not the value: a buffer that no lane changed keeps its exact value.
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


def buffer_slots(modules: Iterable[nn.Module]) -> Iterable[BufferSlot]:
    """Yield the buffers of these modules and those inside them, each once."""
    seen = set()
    for root in modules:
        for path, module in named_modules(root):
            for key in buffer_names(module):
                if (id(module), key) not in seen:
                    seen.add((id(module), key))
                    yield BufferSlot(f"{path}.{key}" if path else key, module, key)


def new_buffer_error(name: str) -> UserError:
    """Return what to raise if a forward pass makes a buffer."""
    return UserError(
        f"the forward pass makes or resizes the buffer {name}, so no checkpoint would fit a new model: make it in "
        f"__init__, in its final size, or keep it in a plain attribute"
    )


def _default_rule(slot: BufferSlot) -> BufferRule | None:
    if has_running_statistics(slot.module) and slot.key in ("running_mean", "running_var"):
        return "mean"
    if slot.key in singular_vectors(slot.module):
        return "first"  # all lanes leave the same
    is_counter = slot.tensor.numel() == 1 and not slot.tensor.is_floating_point() and slot.tensor.dtype != torch.bool
    return "max" if is_counter else None


def _widest(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int64, copy=True)


def _lowest(tensor: Tensor) -> Tensor:
    """Return values that are never the maximum, for a rank that had no sample."""
    wide = _widest(tensor)
    return wide.fill_(-torch.inf if wide.is_floating_point() else torch.iinfo(torch.int64).min)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.numel(), dtype=torch.float64, device=tensor.device)


def _keep_sum(_chunk: Tensor, _start: int) -> None:
    """Leave a chunk as it is: the sums are divided by their last element when all of them are known."""
