"""The worker process of one rank: takes a call over its pipe, joins the process group, runs the function, repeats.

The caller imports this module for its messages and its entry point, so torch is imported inside the functions: a test
session that never uses ranks does not import it.

Messages are pickled: both ends are processes of the same user, joined by an anonymous socket, and a function can be
sent in no other way. It is plain pickle, not multiprocessing's, which passes a tensor as a file in /dev/shm that
outlives a killed worker; plain pickle copies the bytes.
"""

import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from lockstep.config import environment
from lockstep.launcher.worker_main import STACK_DUMP_SIGNAL
from lockstep.supervision.linux_processes import die_with_parent


@dataclass(frozen=True)
class Call:
    """Caller to worker: run this. It sets the worker's whole environment, so that no call depends on earlier ones."""

    rank: int
    size: int
    timeout_s: float  # of the process group
    task: bytes  # pickled (function, args, kwargs); it can be unpickled once `import_path` is set
    environment: dict[str, str]
    working_directory: str
    import_path: list[str]  # the test module may be in a folder that the worker, started earlier, does not search


@dataclass(frozen=True)
class Release:
    """Caller to worker: no rank needs the process group any more."""


@dataclass(frozen=True)
class Ready:
    """Worker to caller: started, or done with the last call; ready for the next."""


@dataclass(frozen=True)
class Returned:
    """Worker to caller: the function has returned this."""

    value: bytes  # pickled; unpickled only when all ranks are done


@dataclass(frozen=True)
class Raised:
    """Worker to caller: the function, or joining, has raised this."""

    traceback: str
    at_s: float  # on the monotonic clock, which the processes of one machine share
    address_taken: bool  # another process took the port that the caller had picked


FromCaller = Call | Release
FromWorker = Ready | Returned | Raised


def send(pipe: Connection, message: FromCaller | FromWorker) -> None:
    """Send a message to the other end."""
    pipe.send_bytes(pickle.dumps(message))


def receive_from_worker(pipe: Connection) -> FromWorker:
    """The worker's next message."""
    message: FromWorker = pickle.loads(pipe.recv_bytes())
    return message


def _receive_from_caller(pipe: Connection) -> FromCaller:
    message: FromCaller = pickle.loads(pipe.recv_bytes())
    return message


def serve(pipe: Connection) -> None:
    """Answer calls until the caller closes its end of the pipe."""
    caller = multiprocessing.parent_process()
    assert caller is not None and caller.pid is not None
    # The kernel ties us to the thread that started us: a worker started from a short-lived thread ends with it, and is
    # replaced.
    die_with_parent(caller.pid)
    # A new session: the terminal's Ctrl-C reaches only the caller, and whatever the function starts can be killed with
    # its rank.
    os.setsid()
    stacks = recv_handle(pipe)
    faulthandler.enable(stacks)

    import torch

    from lockstep.world import process_group  # noqa: F401  (imported now, so that no call's time limit includes it)
    from lockstep.world.script_process import choose_threads

    choose_threads(1)
    torch.set_num_interop_threads(1)
    send(pipe, Ready())
    try:
        while _answer(pipe, stacks):
            send(pipe, Ready())
    except (EOFError, ConnectionError):
        return  # the caller has closed the pipe


def _answer(pipe: Connection, stacks: int) -> bool:
    """Answer one call; return False if this process cannot take another one."""
    from lockstep.world.process_group import cleanup_distributed

    call = _receive_from_caller(pipe)
    assert isinstance(call, Call)
    outcome = _perform(call, stacks)
    send(pipe, outcome)
    if isinstance(outcome, Returned):
        # Rank 0 holds the store and every rank its connections, which the others may still need. A rank that raised
        # leaves at once instead: that ends its peers' collectives with an error rather than a hang.
        _receive_from_caller(pipe)
    try:
        cleanup_distributed()
    except Exception as error:
        send(pipe, _raised(error))
        return False
    return True


def _perform(call: Call, stacks: int) -> Returned | Raised:
    import torch

    from lockstep.world.process_group import setup_distributed

    is_joining = True
    try:
        environment.replace_variables(call.environment)
        os.chdir(call.working_directory)
        sys.path[:] = call.import_path
        # For each call, because an earlier call's function may have replaced the handler.
        faulthandler.register(STACK_DUMP_SIGNAL, file=stacks, all_threads=True)
        # The random numbers must not depend on earlier calls, and differ between ranks, as in newly started processes.
        torch.manual_seed(call.rank)
        function, args, kwargs = pickle.loads(call.task)
        world = setup_distributed(call.rank, call.size, backend="gloo", timeout_s=call.timeout_s, device="cpu")
        is_joining = False
        return Returned(pickle.dumps(function(world, *args, **kwargs)))
    except BaseException as error:  # SystemExit too: a rank that exits without a result has failed
        return _raised(error, is_joining)


def _raised(error: BaseException, is_joining: bool = False) -> Raised:
    text = "".join(traceback.format_exception(error))
    return Raised(text, time.monotonic(), address_taken=is_joining and "address already in use" in text.lower())
