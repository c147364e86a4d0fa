"""What the processes of one size leave in a folder, and how it is read back: JSON, and weights as safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.events.whole_files import write_whole


class Failure(NamedTuple):
    """Of an entry. Its processes have ended with it."""

    name: str
    reason: str | None  # None: it has left no word


class Times(NamedTuple):
    """Of all entries on so many processes."""

    num_parameters: int
    seconds: dict[str, list[float]]  # of a step, by entry and round


class Record:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._times = folder / "times.json"
        self._failure = folder / "failure.json"
        self._turn = folder / "turn"

    def begin_turn(self, name: str) -> None:
        """Who is to blame if all end without a word."""
        self._turn.write_text(name)

    def end_turns(self) -> None:
        self._turn.unlink()

    def note_failure(self, failure: Failure) -> None:
        """The first process that fails is the cause, and the others its victims."""
        try:
            with self._failure.open("x") as file:
                json.dump(failure, file)
        except FileExistsError:
            pass

    def keep_weights(self, name: str, weights: Mapping[str, Any]) -> None:
        from safetensors.torch import save_file

        # Copies, for a tensor that has two names is one that the format would refuse.
        save_file({key: tensor.detach().cpu().clone() for key, tensor in weights.items()}, self._weights(name))

    def keep_times(self, times: Times) -> None:
        write_whole(self._times, json.dumps(times._asdict()))

    def failure(self) -> Failure | None:
        if self._failure.exists():
            return Failure(*json.loads(self._failure.read_text()))
        return Failure(self._turn.read_text(), None) if self._turn.exists() else None

    def times(self) -> Times:
        return Times(**json.loads(self._times.read_text()))

    def weights(self, name: str) -> dict[str, Any]:
        from safetensors.torch import load_file

        return load_file(self._weights(name))

    def _weights(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"
