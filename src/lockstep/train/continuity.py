"""What makes a run one run over several attempts: how far it has come, its checkpoints, and going on from them."""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NoReturn, Protocol

from lockstep.checkpoint.contents import LOADER
from lockstep.checkpoint.manifest import CheckpointError
from lockstep.data.batch import GlobalBatch
from lockstep.data.foreign import Loader
from lockstep.data.iterable import IterableLaneLoader, merge_states
from lockstep.data.streams import State
from lockstep.errors import Stopped
from lockstep.events.event import plain
from lockstep.events.run_folder import Settings
from lockstep.train.checkpoints import Checkpoints, Found, Saving
from lockstep.train.consumption import Consumption
from lockstep.train.drift import DriftError, differences
from lockstep.train.journal import Journal
from lockstep.train.parts import Parts
from lockstep.train.progress import Progress
from lockstep.world.objects import all_gather_object
from lockstep.world.world import World

Resume = Literal["auto", "accept-drift", "force"]

logger = logging.getLogger("lockstep")

_STEPS_TO_BE_HEARD = 2  # a request, at most


class Positioned(Protocol):
    """What is at some place in its data, and can go on from there."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> Any: ...


class Continuity:
    """Without a folder there is nothing to go on from, and `save` does nothing."""

    def __init__(self, journal: Journal, world: World, parts: Parts, resume: Resume) -> None:
        self.progress = Progress()
        self._journal = journal
        self._world = world
        self._parts = parts
        self._resume = resume
        self._checkpoints: Checkpoints | None = None
        self._found: Found | None = None  # until a call of `steps` takes it up
        self._saving = Saving()
        self._saved: Progress | None = None  # at the latest save
        self._parent: str | None = None  # the commit it was, when the folder was let go of
        self._fingerprint: Mapping[str, Any] = {}
        self._consumption = Consumption()
        self._loader_state: Callable[[], Any] = dict  # its position before the batch that is out

    @property
    def is_saved(self) -> bool:
        """Is there a checkpoint of the current step, or one under way?"""
        return self._saved is not None and self._saved.step == self.progress.step

    @property
    def is_ahead(self) -> bool:
        """Has an earlier attempt come to a later call of `steps`, whose state is not loaded yet?"""
        return self._found is not None

    @property
    def found_progress(self) -> Progress | None:
        """How far an earlier attempt has come, whose state is not loaded yet."""
        return None if self._found is None else Progress.from_json(self._found.facts["position"])

    def open(self, settings: Settings, fingerprint: Mapping[str, Any]) -> None:
        """Claim the folder and see what an earlier attempt has left; once."""
        if self._journal.is_open:
            return
        self._journal.open(settings, fingerprint)
        if self._journal.folder is not None:
            self._checkpoints = Checkpoints(self._journal, self._journal.folder, self._world, self._parent)
            # After a call that was finished in this process, the script may have changed something, and that stays.
            if self.progress.call == 0:
                self._found = self._checkpoints.find()

    def begin_call(self, number: int, epochs: int | None, steps: int | None, saving: Saving) -> bool:
        """The `number`-th call of `steps`: is there anything to do in it, or was an earlier attempt in a later one?"""
        self._saving = saving
        if (saved := self.found_progress) is not None:
            if saved.call > number:
                return False
            self.progress = saved
        if self._found is not None and self.progress.call == number:
            self.progress.go_on(epochs, steps)
        else:
            self.progress.begin_call(number, epochs, steps)
        return True

    def take_up(self, loader: Positioned, fingerprint: Mapping[str, Any], *, is_exact: bool) -> str | None:
        """Load what was found, once it is sure that the answer stays the same; its path, if there was any."""
        self._fingerprint = fingerprint
        found, self._found = self._found, None
        if found is not None:
            self._check_drift(found, is_exact=is_exact)
            values = dict(found.values)
            loader.load_state_dict(values.pop(LOADER))
            self._parts.load(values, keep_settings=self._resume == "force")
            if found.is_snapshot:
                self._consumption.restore(found.facts["ledger"]["spans"])
            else:
                self._saved = replace(self.progress)
        self._note_position(loader)
        return None if found is None else found.path

    def batches(self, loader: Loader) -> Iterator[GlobalBatch]:
        """Of this call of `steps`, from where the run is."""
        progress = self.progress
        if progress.asked_epochs is None:
            batches = loader.batches(progress.batches)
        elif isinstance(loader, IterableLaneLoader):
            batches = loader.batches(progress.batches, epochs=progress.asked_epochs, first_epoch=progress.first_epoch)
        else:
            batches = loader.batches(progress.batches, progress.last_batch(len(loader)))
        while True:
            # A save before the next step must not say that its batch, which is fetched already, was consumed.
            self._note_position(loader)
            batch = next(batches, None)
            if batch is None:
                return
            if progress.first_epoch is None:
                progress.first_epoch = batch.epoch
            yield batch

    def consume(self, loader: Loader, batch: GlobalBatch) -> None:
        self.progress.batches += 1
        if self._checkpoints is not None:
            self._consumption.take(loader, batch)

    def save(self, *, is_best: bool = False, **facts: Any) -> None:
        """Begin to save the run as it is between two steps."""
        if self._checkpoints is None:
            return
        self._saved = replace(self.progress)
        self._checkpoints.save(
            self.progress.step,
            self._state(),
            {**self._facts(), **plain(facts)},
            self._consumption,
            retention=self._saving.retention,
            is_best=is_best,
        )

    def ask_for_snapshot(self) -> bool:
        """Rank 0 says when one is due; the others never do."""
        return (
            self._checkpoints is not None
            and self._saving.memory
            and self._checkpoints.ask_for_snapshot(self.progress.step, self._parts.num_bytes)
        )

    def snapshot(self) -> None:
        """Begin to keep the run in memory as it is between two steps, unless it was saved when this was asked for."""
        if self._checkpoints is None:
            return
        if self._saved is not None and self.progress.batches - self._saved.batches <= _STEPS_TO_BE_HEARD:
            self._checkpoints.skip_snapshot()
        else:
            self._checkpoints.snapshot(self.progress.step, self._state, self._facts(), self._consumption)

    def before_update(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.wait_for_copies()

    def look(self) -> None:
        """Say how a save went, if it has come to its end."""
        if self._checkpoints is not None:
            self._checkpoints.look()

    def stop(self) -> NoReturn:
        """End the attempt here, saved."""
        self._make_sure("where the run was to stop")
        raise Stopped(f"stopped after step {self.progress.step}, as asked: the same command goes on from there")

    def finish(self, **facts: Any) -> None:
        self.progress.is_done = True
        self._make_sure("the run's end", **facts)

    def close(self, *, abandon: bool) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close(abandon=abandon)
            self._parent = self._checkpoints.parent
            self._checkpoints = None

    def _state(self) -> dict[str, Any]:
        return {**self._parts.values(), LOADER: self._loader_state()}

    def _facts(self) -> dict[str, Any]:
        return {"position": self.progress.as_json(), "fingerprint": self._fingerprint}

    def _note_position(self, loader: Positioned) -> None:
        state = loader.state_dict()
        self._loader_state = partial(_merged, state) if state else dict

    def _make_sure(self, what: str, **facts: Any) -> None:
        """That the run as it is now is on the disk."""
        if self._checkpoints is None:
            return
        is_good = self._checkpoints.wait()
        if not is_good or self._saved != self.progress:
            self.save(**facts)
            is_good = self._checkpoints.wait()
        if not is_good:
            raise CheckpointError(f"step {self.progress.step}, {what}, could not be saved")
        self._checkpoints.remove_snapshots()

    def _check_drift(self, found: Found, *, is_exact: bool) -> None:
        own = differences(found.facts["fingerprint"], self._fingerprint)
        changed = list(dict.fromkeys(line for lines in all_gather_object(own) for line in lines))
        if not changed or self._resume != "auto":
            return
        text = f"{found.path} was made under other conditions:\n" + "\n".join(f"  {line}" for line in changed)
        if is_exact:
            raise DriftError(
                f"{text}\ngoing on would change the answer: put them back, or accept that with --accept-drift "
                '(in a script: resume="accept-drift")'
            )
        if self._world.is_main:
            logger.warning("%s", text)


def _merged(state: State) -> State:
    """A stream's position over all ranks' lanes."""
    return merge_states(all_gather_object(state))
