"""The table shared in every step: each lane's samples, loss sums and counts, and control flags.

[Note: requests] A rank that stopped or saved alone would leave the others waiting for it. So a rank's request goes
to all ranks in the table that every step shares anyway, and all ranks act on it after the same step.
"""

import hashlib
import operator
from collections import deque
from collections.abc import Mapping
from functools import reduce
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UserError

LossCount = int | float | Tensor
Term = tuple[Tensor, LossCount]
Terms = Mapping[str, Term]

ONLY_TERM = "loss"  # the name of a loss that is one sum and one count
MAX_TERMS = 8

STOP = 1  # control flag: save, and end the attempt
SNAPSHOT = 2  # control flag: keep the state in memory

_SIZE, _NAMES, _NUM_TERMS, _FLAGS, _FIRST_COUNT, _FIRST_SUM = 0, 1, 2, 3, 4, 4 + MAX_TERMS
_NUM_COLUMNS = _FIRST_SUM + MAX_TERMS


def as_terms(loss: Term | Terms) -> Terms:
    """Return a loss as terms by name. Accepts (sum, count), and terms by name with a count each."""
    if type(loss) is tuple and len(loss) == 2 and _can_be_trained_on(loss[0]):  # the usual case, in every lane
        return {ONLY_TERM: loss}
    terms = {ONLY_TERM: loss} if isinstance(loss, tuple) else loss
    if not isinstance(terms, Mapping):
        raise UserError(
            f"a loss is a sum and a count, (sum, count) or {{name: (sum, count), …}}, not {_described(loss)}: "
            "return the sum over the samples and their number"
        )
    if not 1 <= len(terms) <= MAX_TERMS:
        raise UserError(f"a loss has 1 to {MAX_TERMS} terms, not {len(terms)}: add up terms with the same count")
    for name, term in terms.items():
        _check_term(name, term)
    if not any(loss_sum.requires_grad for loss_sum, _ in terms.values()) and not _is_empty(terms):
        raise UserError(
            "the loss does not depend on any parameter that is trained: compute it with the model that is given, and "
            "without .detach(), .item() or torch.no_grad()"
        )
    return terms


def _can_be_trained_on(loss_sum: Any) -> bool:
    return isinstance(loss_sum, Tensor) and loss_sum.requires_grad and loss_sum.numel() == 1


def _check_term(name: str, term: Any) -> None:
    """Raise if a term cannot be trained on. Called for every lane, so it never waits for a device."""
    if not isinstance(term, tuple) or len(term) != 2:
        raise UserError(f"{titled(name)} is a sum and a count, (sum, count), not {_described(term)}")
    loss_sum = term[0]
    if not isinstance(loss_sum, Tensor):
        raise UserError(
            f"{titled(name)}'s sum is {_described(loss_sum)}: return the tensor that the loss function computed, "
            "without .item() or float()"
        )
    if loss_sum.numel() != 1:
        raise UserError(
            f"{titled(name)}'s sum has the shape {tuple(loss_sum.shape)}: return one number, as reduction='sum' or "
            "loss.sum() gives"
        )


def _is_empty(terms: Terms) -> bool:
    """Return whether a lane had nothing to compute a loss of, and says so by its counts."""
    return all(isinstance(count, int | float) and count == 0 for _, count in terms.values())


def check_count(name: str, loss_sum: Tensor, count: LossCount) -> None:
    """Raise if one lane's sum cannot be divided by its count. Does not wait for a device if the count is a number."""
    if isinstance(count, Tensor):
        count = count.item() if count.is_cpu else 1
    if not count > 0 and loss_sum.item() != 0:
        raise UserError(f"{titled(name)} is not zero, but its count is {count}: return how many losses were summed")


def titled(name: str) -> str:
    """Return what to call a term in a message."""
    return "the loss" if name == ONLY_TERM else f"the loss term {name!r}"


def _described(value: Any) -> str:
    """Describe a value of the wrong kind."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return f"a {type(value).__name__}"


def nonzero(counts: Tensor) -> Tensor:
    """Return counts that can be divided by: 1 in the place of 0."""
    return torch.where(counts == 0, torch.ones_like(counts), counts)


class LossTable:
    """One row for each lane: its samples, and its terms' sums and counts. Each rank fills in its own lanes' rows."""

    def __init__(self, num_lanes: int, device: torch.device) -> None:
        self._num_lanes = num_lanes
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._shared: Tensor | None = None  # all ranks' rows, once they have arrived
        self.names: tuple[str, ...] = ()  # of the terms, once a lane has been run here

    def add_lane(self, lane: int, size: int) -> None:
        """Add a row for a lane of `size` samples."""
        self._rows[lane] = _Row(size, [], [])

    def record(self, lane: int, terms: Terms) -> None:
        """Add a backward pass's loss sums and counts to a lane's row."""
        names = tuple(terms)
        if names != (self.names or names):
            raise UserError(
                f"a loss has the terms {list(names)}, but an earlier one of this step had {list(self.names)}: "
                "return the same names, in the same order"
            )
        self.names = names
        row = self._rows[lane]
        for number, (loss_sum, count) in enumerate(terms.values()):
            count = count if type(count) is int else as_count(count)
            value = loss_sum.detach() if loss_sum.dim() == 0 else loss_sum.detach().reshape(())
            if len(row.sums) == number:
                row.sums.append(value)
                row.counts.append(count)
            else:
                row.sums[number] = row.sums[number] + value
                row.counts[number] += count

    def local(self, flags: int = 0) -> Tensor:
        """Return the table in fp64 with this rank's rows, and zeros elsewhere. `flags`: this rank's control flags."""
        table = torch.zeros(self._num_lanes, _NUM_COLUMNS, dtype=torch.float64)
        num_terms, names = len(self.names), _fingerprint(self.names)
        for lane, row in self._rows.items():
            numbers = [count if isinstance(count, int | float) else 0.0 for count in row.counts]
            table[lane, : _FIRST_COUNT + len(numbers)] = torch.tensor(
                [row.size, names, num_terms, flags, *numbers], dtype=torch.float64
            )
        table = table.to(self._device)
        for lane, row in self._rows.items():
            if row.sums:
                table[lane, _FIRST_SUM : _FIRST_SUM + num_terms] = torch.stack(row.sums)
            for term, count in enumerate(row.counts):
                if isinstance(count, Tensor):
                    table[lane, _FIRST_COUNT + term] = count
        return table

    def complete(self, rows: Tensor) -> None:
        """Fill in all ranks' rows: the sum of their local tables.

        That sum is exact in any order, because every element is zero on all ranks but one.
        """
        self._shared = rows

    def check_counts(self) -> None:
        """Raise if a lane of this rank has a loss, but a count of zero."""
        for row in self._rows.values():
            for number, count in enumerate(row.counts):
                if type(count) is not int or count <= 0:  # rarely
                    check_count(self.names[number], row.sums[number], count)

    def check_names(self) -> None:
        """Raise if the ranks' losses have different terms: gradients of different terms would be added up."""
        if len({names for names in self._all_rows[:, _NAMES].tolist() if names}) > 1:
            raise UserError(
                f"loss terms differ between ranks; here they are {list(self.names)}: "
                "return the same names, in the same order, on every rank"
            )

    @property
    def num_terms(self) -> int:
        """The number of terms of the loss; 0 if no lane had a loss."""
        return len(self.names) or int(self._all_rows[:, _NUM_TERMS].max())

    @property
    def sizes(self) -> list[int]:
        """Each lane's number of samples."""
        return [int(size) for size in self._all_rows[:, _SIZE].tolist()]

    def scale(self, term: int) -> Tensor:
        """Return one over a term's count over all lanes; 1 where the count is 0, as the sums are zero then."""
        counts = [row.counts[term] for row in self._rows.values() if row.counts]
        if self._shared is None and all(isinstance(count, int) for count in counts):
            # All lanes are on this rank, and integers add up the same in any order: no table is needed.
            return torch.tensor(1.0 / (sum(counts) or 1), dtype=torch.float64, device=self._device)
        return 1.0 / nonzero(self._all_rows[:, _FIRST_COUNT + term].sum())

    def loss(self) -> Tensor:
        """Return the loss: each term's sum over its count, added up."""
        sums = self._all_rows[:, _FIRST_SUM : _FIRST_SUM + self.num_terms].contiguous().sum(0)
        counts = self._all_rows[:, _FIRST_COUNT : _FIRST_COUNT + self.num_terms].contiguous().sum(0)
        return (sums / nonzero(counts)).sum()

    def loss_sums(self) -> list[Tensor]:
        """Return every lane's loss sums, in tensors that share no memory with the losses themselves."""
        if self._shared is None:
            return [torch.stack([loss_sum for row in self._rows.values() for loss_sum in row.sums])]
        return [self._shared[:, _FIRST_SUM : _FIRST_SUM + self.num_terms]]

    @property
    def flags(self) -> Tensor:
        """The ranks' control flags, by lane; once all ranks' rows have arrived."""
        return self._all_rows[:, _FLAGS]

    def nonfinite_lanes(self) -> list[int]:
        """Return the lanes with a loss sum that is not finite."""
        sums = self._all_rows[:, _FIRST_SUM : _FIRST_SUM + self.num_terms]
        return (~sums.isfinite().all(dim=1)).nonzero().flatten().tolist()

    @property
    def _all_rows(self) -> Tensor:
        if self._shared is None:
            self._shared = self.local()
        return self._shared


def as_count(count: Any) -> LossCount:
    """Return a count as a Python number or a zero-dimensional tensor. NumPy numbers are accepted, too."""
    if isinstance(count, Tensor) and count.numel() == 1:
        return count.detach().reshape(())
    try:
        return operator.index(count)
    except TypeError:
        pass
    try:
        return float(count)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"a loss's count is a number or a tensor of one element, not {count!r}") from None


def _fingerprint(names: tuple[str, ...]) -> int:
    """Return an integer that fp64 holds exactly; 0 for no names."""
    return int.from_bytes(hashlib.blake2b("\x1f".join(names).encode(), digest_size=6).digest()) if names else 0


class _Row(NamedTuple):
    size: int
    sums: list[Tensor]
    counts: list[LossCount]


class ControlFlags:
    """What this rank requests of all ranks, and what any rank has requested. [Note: requests]"""

    def __init__(self) -> None:
        self._own = 0  # requested by this rank, and not sent yet
        self._received = 0
        self._copies: deque[tuple[Tensor, torch.cuda.Event]] = deque()  # of flags on a GPU, not read yet

    def request(self, flags: int) -> None:
        """Request something of all ranks; it is sent with this rank's next step."""
        self._own |= flags

    def take_own(self) -> int:
        """Return what this rank has requested since the last call, to be sent to all ranks."""
        own, self._own = self._own, 0
        return own

    def receive(self, flags: Tensor) -> None:
        """Add what all ranks have requested, one number for each lane. Call it once a step, in order."""
        if flags.is_cpu:
            self._received |= reduce(or_, map(int, flags.tolist()), 0)
            return
        # Reading them now would make the host wait for the GPU in every step: they are read after the next step's.
        copy = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True).copy_(flags, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        self._copies.append((copy, copied))

    def take_received(self) -> int:
        """Return what any rank has requested since the last call: the same on every rank."""
        while len(self._copies) > 1:
            copy, copied = self._copies.popleft()
            copied.synchronize()
            self._received |= reduce(or_, map(int, copy.tolist()), 0)
        received, self._received = self._received, 0
        return received
