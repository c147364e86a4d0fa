"""What `lockstep bench` asks its processes to measure, and the results they leave in a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from lockstep.bench.contenders import Contender
from lockstep.events.atomic_files import write_atomic


class BenchTask(NamedTuple):
    """What the processes of one size measure; passed to them as JSON."""

    model: str
    device: str
    batch: int  # over all processes
    steps: int  # per round; weights are compared after the first round's
    rounds: int  # that are timed; one more precedes them
    contenders: list[Contender]
    folder: str  # for the results

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**{**values, "contenders": [Contender(*each) for each in values["contenders"]]})


class BenchFailure(NamedTuple):
    """A contender that failed, which ended its processes."""

    name: str
    reason: str | None  # None: the processes ended without an exception


class BenchTimes(NamedTuple):
    """What was measured on one number of processes."""

    num_parameters: int
    seconds: dict[str, list[float]]  # per step, by contender and round


class BenchRecord:
    """The results of one number of processes, in a folder: times as JSON, weights as safetensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._times = folder / "times.json"
        self._failure = folder / "failure.json"
        self._turn = folder / "turn"

    def begin_turn(self, name: str) -> None:
        """Record whose turn it is, so that the contender is known if all processes die."""
        self._turn.write_text(name)

    def end_turns(self) -> None:
        """Record that all contenders are done."""
        self._turn.unlink()

    def write_failure(self, failure: BenchFailure) -> None:
        """Keep the first failure, which is the cause; later ones follow from it."""
        try:
            with self._failure.open("x") as file:
                json.dump(failure, file)
        except FileExistsError:
            pass

    def write_weights(self, name: str, weights: Mapping[str, Any]) -> None:
        """Save a contender's weights."""
        from safetensors.torch import save_file

        # Cloned, because safetensors refuses tied weights, which share their memory.
        save_file({key: tensor.detach().cpu().clone() for key, tensor in weights.items()}, self._weights_path(name))

    def write_times(self, times: BenchTimes) -> None:
        """Save what was measured."""
        write_atomic(self._times, json.dumps(times._asdict()))

    def failure(self) -> BenchFailure | None:
        """Return the contender that failed, or whose turn it was when the processes died."""
        if self._failure.exists():
            return BenchFailure(*json.loads(self._failure.read_text()))
        return BenchFailure(self._turn.read_text(), None) if self._turn.exists() else None

    def times(self) -> BenchTimes:
        """Return what `write_times` saved."""
        return BenchTimes(**json.loads(self._times.read_text()))

    def weights(self, name: str) -> dict[str, Any]:
        """Return what `write_weights` saved."""
        from safetensors.torch import load_file

        return load_file(self._weights_path(name))

    def _weights_path(self, name: str) -> Path:
        return self._folder / f"{name}.safetensors"
