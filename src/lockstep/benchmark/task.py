"""What the processes of one size are asked to measure: it travels to them as JSON."""

import json
from typing import NamedTuple, Self

from lockstep.benchmark.catalogue import Entry


class Task(NamedTuple):
    model: str
    device: str
    batch: int  # over all processes
    steps: int  # of a round, and after which the weights are compared
    rounds: int  # that count; one more comes before them
    entries: list[Entry]
    folder: str  # for the results

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**{**values, "entries": [Entry(*each) for each in values["entries"]]})
