"""One rank's process: takes a call, joins its process group, runs the function, leaves the group, takes the next.

The caller imports this module to name its entry point, so torch is imported inside the functions: a test session that
never uses ranks does not pay for it.
"""

import faulthandler
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

from lockstep.config import environment
from lockstep.launcher.kinship import die_with_parent
from lockstep.launcher.worker import STACK_DUMP_SIGNAL
from lockstep.testing.messages import Call, Raised, Ready, Returned, receive_from_caller, send


def serve(pipe: Connection) -> None:
    """Answer calls until the caller closes its end of the pipe."""
    caller = multiprocessing.parent_process()
    assert caller is not None and caller.pid is not None
    # The kernel means the thread that started us. Workers started from a passing thread end with it and are replaced.
    die_with_parent(caller.pid)
    # A process group (the kernel's sort) of its own: the terminal's Ctrl-C goes to the caller alone, and whatever the
    # function starts can be killed with its rank.
    os.setsid()
    stacks = recv_handle(pipe)
    faulthandler.enable(stacks)

    import torch

    from lockstep.world import setup  # noqa: F401  (imported now, so that no call's time limit includes it)

    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    send(pipe, Ready())
    try:
        while _answer(pipe, stacks):
            send(pipe, Ready())
    except (EOFError, ConnectionError):
        return  # the caller is done with us


def _answer(pipe: Connection, stacks: int) -> bool:
    """Answer one call; False if it left this process unfit for another."""
    from lockstep.world.setup import cleanup_distributed

    call = receive_from_caller(pipe)
    assert isinstance(call, Call)
    outcome = _perform(call, stacks)
    send(pipe, outcome)
    if isinstance(outcome, Returned):
        # Rank 0 holds the store and every rank its connections: the others may still need ours. A rank that raised
        # leaves at once instead, which ends its peers' collectives with an error rather than a hang.
        receive_from_caller(pipe)
    try:
        cleanup_distributed()
    except Exception as error:
        send(pipe, _raised(error))
        return False
    return True


def _perform(call: Call, stacks: int) -> Returned | Raised:
    import torch

    from lockstep.world.setup import setup_distributed

    joining = True
    try:
        environment.replace(call.environment)
        os.chdir(call.working_directory)
        sys.path[:] = call.import_path
        # Each time anew: the function of an earlier call may have claimed the signal for itself.
        faulthandler.register(STACK_DUMP_SIGNAL, file=stacks, all_threads=True)
        # The same numbers whatever ran before, and different ones on each rank, as in separately started processes.
        torch.manual_seed(call.rank)
        function, args, kwargs = pickle.loads(call.task)
        world = setup_distributed(call.rank, call.size, backend="gloo", timeout_s=call.timeout_s, device="cpu")
        joining = False
        return Returned(pickle.dumps(function(world, *args, **kwargs)))
    except BaseException as error:  # SystemExit too: a rank that leaves without a result has failed its caller
        return _raised(error, joining)


def _raised(error: BaseException, joining: bool = False) -> Raised:
    text = "".join(traceback.format_exception(error))
    return Raised(text, time.monotonic(), address_taken=joining and "address already in use" in text.lower())
