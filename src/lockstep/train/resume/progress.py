"""How far a run has come: its steps, its batches, and the samples used since the last checkpoint."""

from collections.abc import Callable, Generator, Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from lockstep.config.duration import RunLength
from lockstep.data.iterable_loader import IterableLaneLoader, merge_states
from lockstep.data.lane_loader import LaneLoader
from lockstep.data.lanes import GlobalBatch
from lockstep.data.loader_factory import Loader
from lockstep.events.jsonl import parse_count
from lockstep.world.object_collectives import all_gather_object

_LoaderState = dict[str, Any]  # what a loader's `state_dict` returns: where it continues


@dataclass
class Progress:
    """Where a run is, as checkpoints hold it: the same script, run again, continues from there.

    A script may call `run.steps` several times, one after the other. Run again, it skips the calls that are done and
    continues in the middle of the one that is not: hence a call's number, and where it began.
    """

    step: int = 0  # updates completed
    batches: int = 0  # global batches consumed
    call: int = 0  # of `steps`, from 1; 0: none yet
    asked_epochs: int | None = None  # by that call
    asked_steps: int | None = None
    first_step: int = 0  # updates completed when it began
    first_batch: int = 0
    first_epoch: int | None = None  # of its first batch, once there was one
    is_done: bool = False  # the call has ended, or the run is finished

    def begin_call(self, number: int, epochs: int | None, steps: int | None) -> None:
        self.call, self.asked_epochs, self.asked_steps = number, epochs, steps
        self.first_step, self.first_batch, self.first_epoch = self.step, self.batches, None
        self.is_done = False

    def continue_call(self, epochs: int | None, steps: int | None) -> None:
        """Continue the same call. If it asks for another length now, it is no longer done."""
        self.is_done = self.is_done and (epochs, steps) == (self.asked_epochs, self.asked_steps)
        self.asked_epochs, self.asked_steps = epochs, steps

    @property
    def last_step(self) -> int | None:
        """The updates completed when this call ends, if it asked for a number of updates."""
        return None if self.asked_steps is None else self.first_step + self.asked_steps

    def last_batch(self, batches_per_epoch: int | None) -> int | None:
        """Return the batches consumed when this call ends, if it asked for epochs and their length is known."""
        if self.asked_epochs is None or batches_per_epoch is None:
            return None
        return self.first_batch + self.asked_epochs * batches_per_epoch

    def is_at_end(self, batches_per_epoch: int | None) -> bool:
        last_batch = self.last_batch(batches_per_epoch)
        return (
            self.is_done
            or (self.last_step is not None and self.step >= self.last_step)
            or (last_batch is not None and self.batches >= last_batch)
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return what `as_json` returned. Raises a ValueError for anything else."""
        for each in fields(cls):
            found = value.get(each.name)
            if each.type is bool:
                is_valid = isinstance(found, bool)
            else:
                is_valid = parse_count(found) is not None or (found is None and each.default is None)
            if each.name not in value or not is_valid:
                raise ValueError(f"has no valid {each.name} in its position")
        return cls(**{each.name: value[each.name] for each in fields(cls)})


class BatchCursor:
    """The batches of one call of `steps`, from where the run is, and the loader's position between two of them.

    A loader that reads a stream has read further than the run has come: a checkpoint needs the position before the
    first batch that no step has consumed. So the position is noted before each batch is fetched.
    """

    def __init__(self, loader: Loader, progress: Progress) -> None:
        self._loader = loader
        self._progress = progress
        if progress.asked_epochs is None:
            self._batches = loader.batches(progress.batches)
        elif isinstance(loader, IterableLaneLoader):
            self._batches = loader.batches(
                progress.batches, epochs=progress.asked_epochs, first_epoch=progress.first_epoch
            )
        else:
            self._batches = loader.batches(progress.batches, progress.last_batch(len(loader)))
        self._current_position: _LoaderState | None = None  # before the current step's batch, until it is consumed
        self._peeked: tuple[_LoaderState, GlobalBatch | None] | None = None  # the next batch, and its position
        self._last_position: _LoaderState | None = None  # once it is closed

    def next(self) -> GlobalBatch | None:
        """Return the next batch; None if there is none."""
        self._current_position, batch = self._peeked or self._fetch()
        self._peeked = None
        if batch is not None and self._progress.first_epoch is None:
            self._progress.first_epoch = batch.epoch
        return batch

    def peek(self) -> GlobalBatch | None:
        """Return the next batch without moving on to it. With a stream, all ranks must peek together."""
        if self._peeked is None:
            self._peeked = self._fetch()
        return self._peeked[1]

    def consume(self) -> None:
        """Record that a step has used the current batch."""
        self._current_position = None

    def position(self) -> _LoaderState:
        """Return where the loader continues after the batches consumed so far. All ranks must call it together."""
        own = self._own_position()
        return merge_states(all_gather_object(own)) if own else {}

    def close(self) -> None:
        """End the iteration, and with it the loader's worker processes. The position stays known."""
        self._last_position = self._own_position()
        if isinstance(self._batches, Generator):
            self._batches.close()

    def _own_position(self) -> _LoaderState:
        if self._last_position is not None:
            return self._last_position
        if self._current_position is not None:
            return self._current_position
        if self._peeked is not None:
            return self._peeked[0]
        return self._loader.state_dict()

    def _fetch(self) -> tuple[_LoaderState, GlobalBatch | None]:
        position = self._loader.state_dict()
        return position, next(self._batches, None)


class StepBoundaries:
    """Tells whether a step is the last of its epoch, or of its call of `steps`."""

    def __init__(
        self, progress: Progress, batches_per_epoch: int | None, peek: Callable[[], GlobalBatch | None]
    ) -> None:
        """`peek` returns the batch after the current one; it is called only where there is no other way to know."""
        self.batches_per_epoch = batches_per_epoch
        self._progress = progress
        self._peek = peek

    def is_epoch_end(self, batch: GlobalBatch) -> bool:
        if self.batches_per_epoch is not None:
            return (batch.number + 1) % self.batches_per_epoch == 0
        following = self._peek()
        return following is None or following.epoch != batch.epoch

    def is_last(self, batch: GlobalBatch, *, is_updated: bool) -> bool:
        if self._progress.last_step is not None:
            return self._progress.step + is_updated >= self._progress.last_step
        last_batch = self._progress.last_batch(self.batches_per_epoch)
        return self._peek() is None if last_batch is None else batch.number + 1 >= last_batch


def steps_per_epoch(loader: Loader) -> int | None:
    """Return the steps of an epoch; None for a stream, or for a DataLoader whose sampler has no length."""
    try:
        return len(loader)
    except TypeError:
        return None


def length_of_run(loader: Loader, total_steps: int | None = None) -> RunLength:
    """Return the lengths that durations such as `"2 epochs"` are converted with."""
    return RunLength(steps_per_epoch(loader), loader.global_batch, total_steps)


class ConsumedSamples:
    """The samples that the run has used since its last checkpoint: the next line of the ledger.

    A list of spans, one for each loader in turn. Every batch is added once, in order; a failed save loses none.
    """

    def __init__(self) -> None:
        self._spans: list[dict[str, Any]] = []
        self._covered: list[dict[str, Any]] = []  # by the save in progress, or by one that failed
        self._loader: Loader | None = None

    def add(self, loader: Loader, batch: GlobalBatch) -> None:
        if loader is not self._loader or not self._spans:
            self._loader = loader
            self._spans.append(
                {"data": loader.describe(), "batches": [batch.number, batch.number], "consumed": [], "dropped": []}
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

    def since_last_commit(self) -> list[dict[str, Any]]:
        """Return a copy of all spans since the last committed checkpoint: for a snapshot, which commits nothing."""
        return deepcopy(self._covered + self._spans)

    def restore(self, spans: list[dict[str, Any]]) -> None:
        """Continue from what `since_last_commit` returned."""
        self._covered, self._spans, self._loader = deepcopy(spans), [], None

    def begin_commit(self) -> list[dict[str, Any]]:
        """Return all spans that a checkpoint of the run's current state covers."""
        self._covered += self._spans
        self._spans = []
        return self._covered

    def end_commit(self, *, is_committed: bool) -> None:
        """End a commit. If it failed, the next one covers its spans as well."""
        if is_committed:
            self._covered = []


def _extend(ranges: list[list[int]], epoch: int, positions: range) -> None:
    """Add positions to ranges that the ledger reads as `PositionRange`, in their JSON form: [epoch, start, stop]."""
    if ranges and ranges[-1][0] == epoch and ranges[-1][2] == positions.start:
        ranges[-1][2] = positions.stop
    else:
        ranges.append([epoch, positions.start, positions.stop])
