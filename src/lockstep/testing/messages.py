"""What the caller and a worker say to each other over their pipe.

Pickle is at home here: both ends are this user's processes, joined by a socket without a name, and a function can
travel no other way. It is plain pickle, not multiprocessing's: that one passes a tensor as a file in /dev/shm, which
outlives a killed worker; this one copies its bytes.
"""

import pickle
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(frozen=True)
class Call:
    """Caller to worker: run this. It states all of the worker's surroundings, so no call sees what an earlier left."""

    rank: int
    size: int
    timeout_s: float  # of the process group
    task: bytes  # pickled (function, args, kwargs); it can be read once `import_path` is in place
    environment: dict[str, str]
    working_directory: str
    import_path: list[str]  # the test module may lie where the worker, started earlier, would not look


@dataclass(frozen=True)
class Release:
    """Caller to worker: nobody needs the process group any more."""


@dataclass(frozen=True)
class Ready:
    """Worker to caller: started, or out of the last call's process group; give me a call."""


@dataclass(frozen=True)
class Returned:
    value: bytes  # pickled, and read only when all ranks are done


@dataclass(frozen=True)
class Raised:
    traceback: str
    at_s: float  # on the monotonic clock, which the processes of one machine share
    address_taken: bool  # somebody else got the port the caller had picked


FromCaller = Call | Release
FromWorker = Ready | Returned | Raised


def send(pipe: Connection, message: FromCaller | FromWorker) -> None:
    pipe.send_bytes(pickle.dumps(message))


def receive_from_caller(pipe: Connection) -> FromCaller:
    message: FromCaller = pickle.loads(pipe.recv_bytes())
    return message


def receive_from_worker(pipe: Connection) -> FromWorker:
    message: FromWorker = pickle.loads(pipe.recv_bytes())
    return message
