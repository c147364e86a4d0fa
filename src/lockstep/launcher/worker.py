"""The module every worker starts through: `python -m lockstep.launcher.worker [-m] TARGET [args …]`.

It ties the process to its agent, makes its stack readable from outside, runs the user's script as `python` would, and
leaves word of a failure where the agent finds it. Scripts that never import lockstep are covered too.
"""

import atexit
import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

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
    report_path = environment.failure_report_path()  # now: the script may change the environment
    if (agent_pid := environment.agent_pid()) is not None:
        die_with_parent(agent_pid)
    if sys.platform != "win32":
        faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
    # Whole lines, at once: several ranks share a terminal, and a pipe would hold a dying rank's last words back.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    code = 0
    try:
        run_target(sys.argv[1:])
    except SystemExit as request:
        code = _exit_code(request)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except Exception as error:
        code = 1
        if report_path is not None:
            leave_report(error, report_path)  # the agent prints it, so that the culprit's traceback comes first
        else:
            print(users_traceback(error), file=sys.stderr, end="")
    _leave(code, report_path)


def _exit_code(request: SystemExit) -> int:
    """As the interpreter reads it: nothing is success, text is a complaint."""
    if request.code is None or isinstance(request.code, int):
        return request.code or 0
    print(request.code, file=sys.stderr)
    return 1


def _leave(code: int, report_path: Path | None) -> NoReturn:
    """End this process as the interpreter would, up to the point where only memory is left to tidy up.

    Beyond that point torch's gloo threads can abort a rank whose work is done: after DistributedDataParallel was used
    they outlive their process group, and a run that succeeded would end as one that was killed.
    """
    if report_path is not None:
        # The rest can take seconds. Ranks that still wait for this one fail meanwhile, and are not to blame.
        report_path.with_suffix(".end").write_text(str(code))
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has left, or the script closed it
            stream.flush()
    os._exit(code)


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


def leave_report(error: Exception, path: Path) -> None:
    report = {
        "time": time.time(),
        "error": _shortened("".join(traceback.format_exception_only(error)).rstrip()),
        "traceback": _shortened(users_traceback(error)),
        # A deliberate error needs no traceback and says how the command should end.
        "deliberate": isinstance(error, LockstepError),
        "exit_code": error.exit_code if isinstance(error, LockstepError) else None,
        "communication": _is_communication_failure(error),
    }
    if isinstance(error, LockstepError):
        report["error"] = f"{type(error).__name__}: {error}"
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(report))
    draft.rename(path)


def users_traceback(error: Exception) -> str:
    """The traceback from the user's first line on: the frames before it only push the cause off the screen."""
    trace = error.__traceback__
    while trace is not None and _is_before_the_users(trace.tb_frame):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _is_before_the_users(frame: FrameType) -> bool:
    package, _, module = frame.f_globals.get("__name__", "").partition(".")
    if frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        return True
    return package == "typer" or (package, module) == ("lockstep", "cli")


def _shortened(text: str) -> str:
    """The beginning and the end of an overlong text: the agent reads a bounded report."""
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT // 2]}\n…\n{text[-_MAX_TEXT // 2 :]}"


_MAX_TEXT = 100_000


def _is_communication_failure(error: Exception) -> bool:
    """Is this what a rank raises when *another* rank went away? Torch types such errors for NCCL, not for gloo."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _GLOO_SIGNS)


_GLOO_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Gloo connectFullMesh failed")

if __name__ == "__main__":
    main()
