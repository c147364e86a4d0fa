"""What each lane has to say about a step besides its gradients: loss sums and counts, and how many samples it had."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UserError

Count = int | float | Tensor
Term = tuple[Tensor, Count]
Terms = Mapping[str, Term]

ONLY_TERM = "loss"  # the name of a loss that is one sum and one count
MAX_TERMS = 8

_SIZE, _NUM_TERMS, _FIRST_COUNT, _FIRST_SUM = 0, 1, 2, 2 + MAX_TERMS
_NUM_COLUMNS = _FIRST_SUM + MAX_TERMS


def as_terms(loss: Term | Terms) -> Terms:
    """Both forms a loss can have: (sum, count), or terms by name with a count each."""
    if isinstance(loss, Mapping):
        terms: Terms = loss
    elif isinstance(loss, tuple) and len(loss) == 2:
        terms = {ONLY_TERM: loss}
    else:
        raise UserError(
            f"a loss is a sum and a count, (sum, count) or {{name: (sum, count), …}}, not a {type(loss).__name__}: "
            "return the sum over the samples and their number"
        )
    if not 1 <= len(terms) <= MAX_TERMS:
        raise UserError(f"a loss has 1 to {MAX_TERMS} terms, not {len(terms)}: add up those with the same count")
    return terms


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
        self.names = self.names or tuple(terms)
        if tuple(terms) != self.names:
            raise UserError(f"loss terms {list(terms)} after {list(self.names)}: the same names, in the same order")
        sums = [loss_sum.detach() for loss_sum, _ in terms.values()]
        counts = [count for _, count in terms.values()]
        row = self._rows[lane]
        if row.sums:
            sums = [before + now for before, now in zip(row.sums, sums, strict=True)]
            counts = [before + now for before, now in zip(row.counts, counts, strict=True)]
        self._rows[lane] = _Row(row.size, sums, counts)

    def local(self) -> Tensor:
        """The table in fp64, with this rank's rows only; zeros elsewhere."""
        table = torch.zeros(self._num_lanes, _NUM_COLUMNS, dtype=torch.float64)
        num_terms = len(self.names)
        for lane, row in self._rows.items():
            numbers = [count if isinstance(count, int | float) else 0.0 for count in row.counts]
            table[lane, : _FIRST_COUNT + len(numbers)] = torch.tensor(
                [row.size, num_terms, *numbers], dtype=torch.float64
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

    @property
    def num_terms(self) -> int:
        return len(self.names) or int(self._all_rows[:, _NUM_TERMS].max())

    @property
    def sizes(self) -> list[int]:
        """Each lane's number of samples."""
        return [int(size) for size in self._all_rows[:, _SIZE].tolist()]

    def scale(self, term: int) -> Tensor | float:
        """One over a term's count over all lanes; where nothing was counted the sums are zero too, and stay so.

        To multiply by: torch does not divide by a number and by a tensor in the same way on every device.
        """
        counts = [row.counts[term] for row in self._rows.values() if row.counts]
        if self._shared is None and not any(isinstance(count, Tensor) for count in counts):
            return 1.0 / (float(sum(counts)) or 1.0)  # all lanes are here, and no tensor needs to be made
        return 1.0 / nonzero(self._all_rows[:, _FIRST_COUNT + term].sum())

    def loss(self) -> Tensor:
        """Each term's sum over its count, added up."""
        sums = self._all_rows[:, _FIRST_SUM : _FIRST_SUM + self.num_terms].contiguous().sum(0)
        counts = self._all_rows[:, _FIRST_COUNT : _FIRST_COUNT + self.num_terms].contiguous().sum(0)
        return (sums / nonzero(counts)).sum()

    @property
    def _all_rows(self) -> Tensor:
        if self._shared is None:
            self._shared = self.local()
        return self._shared


class _Row(NamedTuple):
    size: int
    sums: list[Tensor]
    counts: list[Count]
