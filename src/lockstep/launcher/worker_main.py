"""The program of every rank: runs the user's script, with a heartbeat and an error report.

Started as `python -m lockstep.launcher.worker_main [-m] TARGET [args …]`; a warm rank is a fork that begins in `main`:
[Note: fork server]. It registers the signals that dump its stacks, begins its heartbeat, runs the user's script as
`python` would, and writes an error report where the agent finds it. All of this also works for scripts that never
import lockstep.
"""

import atexit
import faulthandler
import json
import multiprocessing
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
from lockstep.launcher.env_rendezvous import join_through_job_store
from lockstep.launcher.exit_callbacks import closing_at_exit
from lockstep.launcher.join_reminder import remind_to_join
from lockstep.launcher.nested_jobs import error_of_child, recognize_nested_jobs
from lockstep.supervision import heartbeat
from lockstep.supervision.agent_folder import RankFiles, make_socket_folder
from lockstep.supervision.flight_recorder import start_listener, write_collectives
from lockstep.supervision.io_recorder import OutputRecord, record_output
from lockstep.supervision.output_streams import keep_failing_streams
from lockstep.supervision.process_title import describe_target, title_forks_of_rank, title_rank
from lockstep.supervision.stack_dumps import STACKS_SIGNAL
from lockstep.supervision.step_recorder import record_steps
from lockstep.terminal_text import print_line

if sys.platform != "win32":
    # Dumps the stacks to the terminal, for people. Not SIGUSR1: Slurm sends that before a job's time limit.
    STACK_DUMP_SIGNAL = signal.SIGUSR2

_MAX_TEXT_CHARS = 40_000  # of each of the report's two texts; a character may take 12 bytes, and the agent reads 1 MiB
_GLOO_ERRORS = (
    "gloo/transport",
    "Connection closed by peer",
    "Connection reset by peer",
    "Gloo connectFullMesh failed",
    "Wait timeout",  # of a store that is a file
    "Timeout waiting for key",
)
_PACKAGE = Path(__file__).parents[1]
# The parts of lockstep that run a user's script; their frames are omitted from tracebacks.
_RUNS_SCRIPTS = frozenset(
    "cli launcher command_line batch bench chaos ckpt doctor init plan report submit verify watch".split()  # noqa: SIM905
)


def main(arguments: list[str]) -> NoReturn:
    """Run a script, or `-m` a module, as a rank; exit with its exit code."""
    files = RankFiles.own()  # read now: the script may change the environment
    if sys.platform != "win32":
        faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
    if files is not None:
        _begin_supervision(files)
        place = environment.read_placement()
        title_rank(place, describe_target(arguments))
        title_forks_of_rank()
        if place.store_file or place.store_prefix:
            join_through_job_store(place)
        if "torch" in sys.modules:  # as in every warm rank
            recognize_nested_jobs()
            if place.rank == 0 and place.world_size > 1:
                remind_to_join(place)
    if (request := environment.read_verify_request()) is not None:
        _record_for_verify(request)
    keep_failing_streams()
    # Flush every line: several ranks share a terminal, and a pipe would hold back a dying rank's last lines.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    code = 0
    try:
        run_target(arguments)
    except SystemExit as end:
        code = _exit_code(end)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:  # asyncio's CancelledError is not an Exception
        if sys.platform != "win32":
            # Torch's SIGCHLD handler raises when a data worker has died, which is often the reason for `error`; it
            # must not interrupt the report.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        code = 1
        try:
            if files is not None:
                if _is_communication_failure(error):
                    with suppress(OSError):
                        write_collectives(files.collectives)  # what it waited in may show which rank is the cause
                write_error_report(error_of_child(error), files.report)  # the agent prints all reports, the cause first
        except OSError:
            files = None
        if files is None:
            print_line(user_traceback(error), file=sys.stderr, end="")
    _exit(code, files)


def _begin_supervision(files: RankFiles) -> None:
    """Begin the heartbeat, and answer the agent's requests for stacks and collectives."""
    heartbeat.begin(files.heartbeat)
    if "torch" in sys.modules:  # in a warm rank, count the steps of scripts that never import lockstep too
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: heartbeat.count_optimizer_step())
    if (sockets := make_socket_folder(files)) is not None:
        # Where `multiprocessing` keeps its sockets has no public name: `tests/contracts/test_private_names_elastic.py`.
        multiprocessing.current_process()._config["tempdir"] = str(sockets)  # type: ignore[attr-defined]
    heartbeat.enter(heartbeat.Phase.SCRIPT)
    if STACKS_SIGNAL is not None:
        # Kept open for the life of the process: the signal handler that dumps the stacks cannot open files.
        stacks = os.open(files.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True)
        start_listener(files)


def _record_for_verify(request: environment.VerifyRequest) -> None:
    """Record what `lockstep verify` compares between jobs."""
    place = environment.read_placement()
    record = OutputRecord(request.folder, place.rank)
    record_output(record)
    if request.runs is not None:  # a script; if it turns out to have a lockstep loop, that removes the recorder
        record_steps(record, request.steps, place.world_size)


def _exit_code(end: SystemExit) -> int:
    """Return the exit code that the interpreter would use: None means success, and text is printed."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def _exit(code: int, files: RankFiles | None) -> NoReturn:
    """Exit as the interpreter would, up to the point where only memory is left to free.

    Beyond that point torch's gloo threads can abort a rank whose work is done: after DistributedDataParallel was used
    they outlive their process group, and a successful run would look as if it had been killed.

    Python has no public names for the two calls, the wait for threads and atexit's handlers. Checked with CPython 3.11
    to 3.13; see `tests/contracts/test_private_names_elastic.py`.
    """
    if code == 0:
        threading._shutdown()  # type: ignore[attr-defined]  # threads that go on may still meet the other ranks
        heartbeat.enter(heartbeat.Phase.LEAVING)  # after a failure, the phase stays the one in which it happened
    if files is not None:
        # The rest can take seconds in which ranks that wait for this one fail: the agent must know the cause by then.
        with suppress(OSError):
            files.end.write_text(str(code))
    if code != 0:
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # the script has closed it, or put one of its own there
            stream.flush()
    os._exit(code)


def run_target(arguments: list[str]) -> None:
    """Run a script, or `-m` a module, in this process as `python` would; then close the runs that it has left open."""
    with closing_at_exit():
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")


def write_error_report(error: BaseException, path: Path) -> None:
    """Write what made a rank fail, in the format of `supervision.failure_report.ErrorReport`."""
    is_deliberate = isinstance(error, LockstepError)
    text = "".join(traceback.format_exception_only(error)).rstrip()
    is_in_one_line = is_deliberate or isinstance(error, SyntaxError)  # whose text begins with the line of code
    report = {
        "time": time.time(),
        "error": f"{type(error).__name__}: {error}" if is_in_one_line else _shortened(text),
        "traceback": _shortened(user_traceback(error)),
        "deliberate": is_deliberate,
        "exit_code": error.exit_code if isinstance(error, LockstepError) else None,
        "communication": _is_communication_failure(error),
    }
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(report))
    draft.rename(path)


def user_traceback(error: BaseException) -> str:
    """Format a traceback from the user's first line on: the frames before it would push the cause off the screen."""
    trace = error.__traceback__
    while trace is not None and _runs_script(trace.tb_frame):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _runs_script(frame: FrameType) -> bool:
    """Does this frame belong to whatever started the user's script?"""
    package, _, module = str(frame.f_globals.get("__name__", "")).partition(".")
    if frame.f_code.co_filename in (runpy.__file__, "<frozen runpy>") or package == "typer":
        return True
    if package == "__main__":  # one of lockstep's programs; but the script has that name too
        return Path(frame.f_code.co_filename).is_relative_to(_PACKAGE)
    return package == "lockstep" and module.partition(".")[0] in _RUNS_SCRIPTS


def _shortened(text: str) -> str:
    """Cut the middle out of a text that is too long."""
    if len(text) <= _MAX_TEXT_CHARS:
        return text
    return f"{text[: _MAX_TEXT_CHARS // 2]}\n…\n{text[-_MAX_TEXT_CHARS // 2 :]}"


def _is_communication_failure(error: BaseException) -> bool:
    """Does a rank raise this error when *another* rank is gone? Torch has types for NCCL's errors, not for gloo's."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _GLOO_ERRORS)


if __name__ == "__main__":
    main(sys.argv[1:])
