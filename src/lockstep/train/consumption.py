"""What the run has used of its data since the last commit: the next line of the ledger."""

from copy import deepcopy
from typing import Any

from lockstep.data.batch import GlobalBatch
from lockstep.data.foreign import Loader
from lockstep.data.loader import LaneLoader

Stretch = list[int]  # [epoch, first, past the last]: positions in the epoch's order, or batches where there is none


class Consumption:
    """A list of spans, one for each loader in turn. Every batch comes once, in order; a failed save forgets none."""

    def __init__(self) -> None:
        self._spans: list[dict[str, Any]] = []
        self._covered: list[dict[str, Any]] = []  # by the commit under way, or by one that failed
        self._loader: Loader | None = None

    def take(self, loader: Loader, batch: GlobalBatch) -> None:
        if loader is not self._loader or not self._spans:
            self._loader = loader
            self._spans.append(
                {"data": loader.facts(), "batches": [batch.number, batch.number], "consumed": [], "dropped": []}
            )
        span = self._spans[-1]
        span["batches"][1] = batch.number + 1
        if isinstance(loader, LaneLoader):
            epoch, positions = loader.positions(batch.number)
            _extend(span["consumed"], epoch, positions)
            is_last = (batch.number + 1) % len(loader) == 0
            if is_last and (dropped := loader.dropped(epoch)):
                _extend(span["dropped"], epoch, dropped)
        else:
            _extend(span["consumed"], batch.epoch, range(batch.number, batch.number + 1))

    def so_far(self) -> list[dict[str, Any]]:
        """A copy of all spans since the last commit that was made; for a snapshot, which is none."""
        return deepcopy(self._covered + self._spans)

    def restore(self, spans: list[dict[str, Any]]) -> None:
        """Go on from what `so_far` has said."""
        self._covered, self._spans, self._loader = deepcopy(spans), [], None

    def begin_commit(self) -> list[dict[str, Any]]:
        """All spans that a commit of the run as it is now covers."""
        self._covered += self._spans
        self._spans = []
        return self._covered

    def end_commit(self, *, is_made: bool) -> None:
        """If not, the next one covers them."""
        if is_made:
            self._covered = []


def _extend(stretches: list[Stretch], epoch: int, positions: range) -> None:
    if stretches and stretches[-1][0] == epoch and stretches[-1][2] == positions.start:
        stretches[-1][2] = positions.stop
    else:
        stretches.append([epoch, positions.start, positions.stop])
