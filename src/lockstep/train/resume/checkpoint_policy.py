"""When a run saves itself, and which of its checkpoints stay on the disk."""

from dataclasses import dataclass

from lockstep.checkpoint.checkpoint_store import Retention
from lockstep.config.duration import Duration, RunLength
from lockstep.errors import UserError


@dataclass(frozen=True)
class CheckpointPolicy:
    """When to save, and which checkpoints to keep. A run is always saved at its end, and when it is asked to stop.

    Args:
        every: how often to save in between: a number of steps (`100`) or a duration (`"1 epoch"`). None: never.
        keep: how many of the newest checkpoints stay. The best one, if there is one, always stays.
        keep_every: keep the checkpoints of every `keep_every`-th step as well.
        memory: also keep the newest state in shared memory, where the launcher can restart the run from it.

    Example:
        `trainer.train(loader, epochs=10, checkpoints=CheckpointPolicy(every="1 epoch", keep=2))`
    """

    every: Duration | str | int | None = None
    keep: int = 3
    keep_every: int | None = None
    memory: bool = True

    def __post_init__(self) -> None:
        if self.keep < 1:
            raise UserError(f"keep={self.keep}: expected 1 or more checkpoints")
        if self.keep_every is not None and self.keep_every < 1:
            raise UserError(f"keep_every={self.keep_every}: expected 1 or more steps")

    def in_steps(self, length: RunLength) -> int | None:
        """Return `every` in steps, for a run of this length."""
        if self.every is None:
            return None
        try:
            steps = Duration.parse(self.every).in_steps(length, "save_every")
        except ValueError as error:
            raise UserError(f"save_every: {error}") from None
        if steps < 1:
            raise UserError(f"save_every={self.every}: expected 1 step or more")
        return steps

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay: `keep` and `keep_every`."""
        return Retention(self.keep, self.keep_every)
