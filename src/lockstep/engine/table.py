"""What each lane has to say about a step besides its gradients: loss sums and counts, and how many samples it had."""

import hashlib
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UserError

Count = int | float | Tensor
Term = tuple[Tensor, Count]
Terms = Mapping[str, Term]

ONLY_TERM = "loss"  # the name of a loss that is one sum and one count
MAX_TERMS = 8

_SIZE, _NAMES, _NUM_TERMS, _ASKED, _FIRST_COUNT, _FIRST_SUM = 0, 1, 2, 3, 4, 4 + MAX_TERMS
_NUM_COLUMNS = _FIRST_SUM + MAX_TERMS


def as_terms(loss: Term | Terms) -> Terms:
    """Both forms a loss can have: (sum, count), or terms by name with a count each."""
    if isinstance(loss, tuple) and len(loss) == 2:
        return {ONLY_TERM: loss}
    if not isinstance(loss, Mapping):
        raise UserError(
            f"a loss is a sum and a count, (sum, count) or {{name: (sum, count), …}}, not a {type(loss).__name__}: "
            "return the sum over the samples and their number"
        )
    if not 1 <= len(loss) <= MAX_TERMS:
        raise UserError(f"a loss has 1 to {MAX_TERMS} terms, not {len(loss)}: add up those with the same count")
    return loss


def nonzero(counts: Tensor) -> Tensor:
    """Counts to divide by."""
    return torch.where(counts == 0, torch.ones_like(counts), counts)


class LaneTable:
    """One row per lane: its samples, its terms' sums and counts. Each rank fills in the rows of its own lanes."""

    def __init__(self, num_lanes: int, device: torch.device) -> None:
        self._num_lanes = num_lanes
        self._device = device
        self._rows: dict[int, _Row] = {}
        self._shared: Tensor | None = None  # all ranks' rows, once they are here
        self.names: tuple[str, ...] = ()  # of the terms, once a lane has been run here

    def add_lane(self, lane: int, size: int) -> None:
        self._rows[lane] = _Row(size, [], [])

    def record(self, lane: int, terms: Terms) -> None:
        """What several backward passes record for one lane adds up."""
        names = tuple(terms)
        if names != (self.names or names):
            raise UserError(f"loss terms {list(names)} after {list(self.names)}: the same names, in the same order")
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

    def local(self, asked: int = 0) -> Tensor:
        """The table in fp64, with this rank's rows only; zeros elsewhere. `asked`: for all ranks, [Note: requests]."""
        table = torch.zeros(self._num_lanes, _NUM_COLUMNS, dtype=torch.float64)
        num_terms, names = len(self.names), _fingerprint(self.names)
        for lane, row in self._rows.items():
            numbers = [count if isinstance(count, int | float) else 0.0 for count in row.counts]
            table[lane, : _FIRST_COUNT + len(numbers)] = torch.tensor(
                [row.size, names, num_terms, asked, *numbers], dtype=torch.float64
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
        """All ranks' rows are here: the sum of their local tables, which is exact in any order, because every element
        is zero on all ranks but one."""
        self._shared = rows

    def check_names(self) -> None:
        """All ranks must speak of the same terms: else gradients of different terms would be added up."""
        if len({names for names in self._all_rows[:, _NAMES].tolist() if names}) > 1:
            raise UserError(
                f"loss terms differ between ranks; here they are {list(self.names)}: the same names, in the same order"
            )

    @property
    def num_terms(self) -> int:
        return len(self.names) or int(self._all_rows[:, _NUM_TERMS].max())

    @property
    def sizes(self) -> list[int]:
        """Each lane's number of samples."""
        return [int(size) for size in self._all_rows[:, _SIZE].tolist()]

    def scale(self, term: int) -> Tensor:
        """One over a term's count over all lanes; where nothing was counted the sums are zero too, and stay so."""
        counts = [row.counts[term] for row in self._rows.values() if row.counts]
        if self._shared is None and all(isinstance(count, int) for count in counts):
            # All lanes are here, and whole numbers add up the same in any order: no table needs to be made.
            return torch.tensor(1.0 / (sum(counts) or 1), dtype=torch.float64, device=self._device)
        return 1.0 / nonzero(self._all_rows[:, _FIRST_COUNT + term].sum())

    def loss(self) -> Tensor:
        """Each term's sum over its count, added up."""
        sums = self._all_rows[:, _FIRST_SUM : _FIRST_SUM + self.num_terms].contiguous().sum(0)
        counts = self._all_rows[:, _FIRST_COUNT : _FIRST_COUNT + self.num_terms].contiguous().sum(0)
        return (sums / nonzero(counts)).sum()

    def loss_sums(self) -> list[Tensor]:
        """Every lane's sums, in tensors that are nobody else's."""
        if self._shared is None:
            return [torch.stack([loss_sum for row in self._rows.values() for loss_sum in row.sums])]
        return [self._shared[:, _FIRST_SUM : _FIRST_SUM + self.num_terms]]

    @property
    def asked(self) -> Tensor:
        """What the ranks ask for, by lane; once all ranks' rows are here."""
        return self._all_rows[:, _ASKED]

    def nonfinite_lanes(self) -> list[int]:
        sums = self._all_rows[:, _FIRST_SUM : _FIRST_SUM + self.num_terms]
        return (~sums.isfinite().all(dim=1)).nonzero().flatten().tolist()

    @property
    def _all_rows(self) -> Tensor:
        if self._shared is None:
            self._shared = self.local()
        return self._shared


def as_count(count: Any) -> Count:
    """A count as a plain number, or as a tensor of one element; numpy's numbers are numbers too."""
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
    """A whole number that fp64 holds exactly; 0: no names."""
    return int.from_bytes(hashlib.blake2b("\x1f".join(names).encode(), digest_size=6).digest()) if names else 0


class _Row(NamedTuple):
    size: int
    sums: list[Tensor]
    counts: list[Count]
