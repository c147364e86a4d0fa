"""The last collectives of each rank: torch's flight recorder, dumped by a thread of the rank.

[Note: listener]

Only the process itself can read its flight recorder. So each rank has a thread that blocks in the read of a named pipe
and costs nothing until the agent writes to it. The thread increments a count in the heartbeat page when it receives a
request, and again when the collectives are written. It needs the interpreter lock for that: a rank that dumps its
stacks on request but does not acknowledge is in a native call that holds the lock.

[Note: flight recorder names]

The functions that dump the recorder have no public name in torch. Checked with torch 2.11 and 2.13:
`_dump_nccl_trace_json` for NCCL and `_dump_fr_trace_json` for the other backends, both in `torch._C._distributed_c10d`
and both without required arguments. If a version of torch has neither, hang reports omit the collectives and nothing
else changes. `tests/contracts/test_private_names_elastic.py` fails when a name disappears.
"""

import _thread
import math
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.events.jsonl import parse_json
from lockstep.supervision import heartbeat
from lockstep.supervision.agent_folder import RankFiles

RECORDER_MODULE = "torch._C._distributed_c10d"
DUMP_FUNCTIONS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")
NUM_ACKNOWLEDGEMENTS = 2  # of each request: received; the collectives are written

_REQUEST = b"c"
_MAX_BYTES = 16 * 2**20
_MAX_COLLECTIVES = 64
_OWN_SIZES = ("scatter", "gather", "all_to_all", "alltoall", "alltoall_base")  # in these, each rank may give another


class Collective(NamedTuple):
    """One entry of the flight recorder."""

    number: int  # in its group, from 1
    group: str
    name: str  # all_reduce
    sizes: str  # of its input, as in [[4, 4]]
    is_done: bool
    backend: str = ""
    started: float = 0.0  # seconds since the epoch

    @property
    def words(self) -> str:
        """Text for messages: `all_reduce of [[4, 4]]`; a barrier has no sizes."""
        return self.name if self.sizes == "[]" else f"{self.name} of {self.sizes}"

    @property
    def num_elements(self) -> int:
        """How many elements its input has: `[[3, 4], [2]]` has 14."""
        return sum(math.prod(shape) for shape in parse_json(self.sizes))

    @property
    def signature(self) -> tuple[str, int | None]:
        """What must be equal on all ranks of a collective. A shape need not be, if its size is."""
        return self.name, None if self.name in _OWN_SIZES else self.num_elements


def start_listener(files: RankFiles) -> None:
    """In a rank: dump the collectives whenever the agent asks. Not a `threading` thread: scripts may count those."""
    os.mkfifo(files.requests, 0o600)
    # Opened for writing too: otherwise the pipe would end when the agent closes its side after the first request.
    pipe = os.open(files.requests, os.O_RDWR | os.O_CLOEXEC)
    _thread.start_new_thread(_serve_requests, (pipe, files.collectives))


def request_collectives(files: RankFiles) -> bool:
    """In the agent: ask a rank to write its last collectives; return False if it has no listener.

    The rank acknowledges by incrementing its heartbeat's count `NUM_ACKNOWLEDGEMENTS` times.
    """
    try:
        pipe = os.open(files.requests, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.write(pipe, _REQUEST) == len(_REQUEST)
    except OSError:  # the pipe is full of unanswered requests
        return False
    finally:
        os.close(pipe)


def read_collectives(path: Path) -> list[Collective]:
    """Return the latest collectives in order, without point-to-point messages; an empty list if unreadable."""
    try:
        with path.open("rb") as file:
            entries: Any = parse_json(file.read(_MAX_BYTES)).get("entries", [])
        return [_collective(entry) for entry in entries if not entry["is_p2p"]][-_MAX_COLLECTIVES:]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []


def _serve_requests(pipe: int, collectives: Path) -> None:
    with suppress(OSError):  # the script closed file descriptors that it did not open
        while requests := os.read(pipe, 64):
            for _ in requests:
                heartbeat.acknowledge_request()
                write_collectives(collectives)
                heartbeat.acknowledge_request()


def write_collectives(path: Path) -> None:
    """In a rank: write its last collectives, from the first recorder that has any: [Note: flight recorder names]."""
    recorders = sys.modules.get(RECORDER_MODULE)
    for name in DUMP_FUNCTIONS:
        dump = getattr(recorders, name, None)
        if dump is not None and b'"entries"' in (text := dump()):
            draft = path.with_suffix(".draft")
            draft.write_bytes(text)
            draft.rename(path)
            return


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
