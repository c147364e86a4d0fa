"""The module every worker starts through: `python -m lockstep.launcher.worker [-m] TARGET [args …]`.

It ties the process to its agent, makes its stack readable from outside, runs the user's script as `python` would, and
leaves word of a failure where the agent finds it. Scripts that never import lockstep are covered too.
"""

import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from lockstep.config import environment
from lockstep.errors import LockstepError

if sys.platform != "win32":
    # Not SIGUSR1: Slurm sends that to announce the end of a job's time.
    STACK_DUMP_SIGNAL = signal.SIGUSR2

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, even by SIGKILL. Linux only; elsewhere a no-op."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        os._exit(1)


def main() -> None:
    if (agent_pid := environment.agent_pid()) is not None:
        die_with_parent(agent_pid)
    if sys.platform != "win32":
        faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
    # Whole lines, at once: several ranks share a terminal, and a pipe would hold a dying rank's last words back.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    try:
        run_target(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        _leave_report(error)
        # The agent prints the traceback, so that the culprit's comes first; with no agent to do it, print it here.
        if environment.failure_report_path() is None:
            raise
        sys.exit(1)


def run_target(arguments: list[str]) -> None:
    """Run a script, or `-m` a module, in this process as `python` would."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")


def _leave_report(error: Exception) -> None:
    path = environment.failure_report_path()
    if path is None:
        return
    report = {
        "time": time.time(),
        "error": f"{type(error).__name__}: {error}",
        "traceback": "".join(traceback.format_exception(type(error), error, _users_part(error.__traceback__))),
        # A deliberate error needs no traceback and says how the command should end.
        "deliberate": isinstance(error, LockstepError),
        "exit_code": error.exit_code if isinstance(error, LockstepError) else None,
        "communication": _is_communication_failure(error),
    }
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(report))
    draft.rename(path)


def _users_part(trace: TracebackType | None) -> TracebackType | None:
    """Drop the frames between this module and the user's first line: they only push the cause off the screen."""
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _is_communication_failure(error: Exception) -> bool:
    """Is this what a rank raises when *another* rank went away? Torch types such errors for NCCL, not for gloo."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _GLOO_SIGNS)


_GLOO_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Gloo connectFullMesh failed")

if __name__ == "__main__":
    main()
