"""What a rank and its agent leave for each other, in a folder that the agent makes and removes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from lockstep.config import environment

FOLDER_PREFIX = "lockstep-agent-"  # of that folder's name


@dataclass(frozen=True)
class RankFiles:
    folder: Path
    rank: int

    @classmethod
    def own(cls) -> Self | None:
        """Of this process, if an agent has started it."""
        folder = environment.supervision_folder()
        return None if folder is None else cls(folder, environment.read_placement().rank)

    @property
    def pulse(self) -> Path:
        """Where it is: see `supervision.pulse`."""
        return self._named("pulse")

    @property
    def report(self) -> Path:
        """What it failed of, in its own words."""
        return self._named("json")

    @property
    def end(self) -> Path:
        """The exit code of a rank whose script is over, while its process still ends."""
        return self._named("end")

    @property
    def stacks(self) -> Path:
        """Its threads' Python stacks, each time it was asked for them."""
        return self._named("stacks")

    @property
    def questions(self) -> Path:
        """A pipe on which its agent asks it: see `supervision.listener`."""
        return self._named("questions")

    @property
    def collectives(self) -> Path:
        """Its last collectives, when it was asked for them."""
        return self._named("collectives")

    @property
    def run_folder(self) -> Path:
        """The path of the run folder, if it has opened one."""
        return self._named("run")

    def _named(self, suffix: str) -> Path:
        return self.folder / f"rank-{self.rank}.{suffix}"
