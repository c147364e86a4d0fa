"""The last collectives of a rank, from torch's flight recorder."""

from pathlib import Path
from typing import Any, NamedTuple

from lockstep.config.json_text import parse_json

_MAX_BYTES = 16 * 2**20
_MOST = 64


class Collective(NamedTuple):
    number: int  # in its group, from 1
    group: str
    name: str  # all_reduce
    sizes: str  # of its input, as in [[4, 4]]
    is_done: bool
    backend: str = ""
    started: float = 0.0  # by the clock on the wall

    @property
    def words(self) -> str:
        return f"{self.name} of {self.sizes}"


def read_collectives(path: Path) -> list[Collective]:
    """The latest, in their order; none, where they cannot be read. Messages between two ranks are left out."""
    try:
        with path.open("rb") as file:
            entries: Any = parse_json(file.read(_MAX_BYTES)).get("entries", [])
        return [_collective(entry) for entry in entries if not entry["is_p2p"]][-_MOST:]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _collective(entry: dict[str, Any]) -> Collective:
    backend, _, name = str(entry["profiling_name"]).rpartition(":")
    return Collective(
        number=int(entry["collective_seq_id"]),
        group=str(entry["process_group"][0]),
        name=name,
        sizes=str(entry["input_sizes"]),
        is_done=bool(entry["retired"]),
        backend=backend,
        started=int(entry["time_created_ns"]) / 1e9,
    )
