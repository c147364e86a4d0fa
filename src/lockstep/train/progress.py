"""How far a run has come: what a checkpoint must say so that the same script, run again, goes on where it was."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self


@dataclass
class Progress:
    """A script may call `run.steps` several times, one after the other. Run again, it skips the calls that are done and
    goes on in the middle of the one that was not: hence a call's number, and where it began.
    """

    step: int = 0  # updates completed
    batches: int = 0  # global batches consumed
    call: int = 0  # of `steps`, from 1; 0: none yet
    asked_epochs: int | None = None  # by that call
    asked_steps: int | None = None
    first_step: int = 0  # completed when it began
    first_batch: int = 0
    first_epoch: int | None = None  # of its first batch, once there was one
    is_done: bool = False  # it came to its end, or the run was finished

    def begin_call(self, number: int, epochs: int | None, steps: int | None) -> None:
        self.call, self.asked_epochs, self.asked_steps = number, epochs, steps
        self.first_step, self.first_batch, self.first_epoch = self.step, self.batches, None
        self.is_done = False

    def go_on(self, epochs: int | None, steps: int | None) -> None:
        """In the same call. One that was done is not any more, if it is now asked for something else."""
        self.is_done = self.is_done and (epochs, steps) == (self.asked_epochs, self.asked_steps)
        self.asked_epochs, self.asked_steps = epochs, steps

    @property
    def last_step(self) -> int | None:
        """How many updates there will have been when this call ends, where it was asked for updates."""
        return None if self.asked_steps is None else self.first_step + self.asked_steps

    def last_batch(self, batches_per_epoch: int | None) -> int | None:
        """How many batches, where it was asked for epochs and their length is known."""
        if self.asked_epochs is None or batches_per_epoch is None:
            return None
        return self.first_batch + self.asked_epochs * batches_per_epoch

    def is_at_its_end(self, batches_per_epoch: int | None) -> bool:
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
        return cls(**{field.name: value[field.name] for field in fields(cls)})
