"""The module every worker starts through: `python -m lockstep.launcher.worker [-m] TARGET [args …]`.

It makes the process's stack readable from outside, has it show its pulse, runs the user's script as `python` would, and
leaves word of a failure where the agent finds it. Scripts that never import lockstep are covered too. A warm rank is
a fork that begins in `main`: see [Note: nursery].
"""

import atexit
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
from lockstep.supervision import pulse
from lockstep.supervision.listener import listen
from lockstep.supervision.rank_files import RankFiles
from lockstep.supervision.stacks import ASK_FOR_STACKS
from lockstep.supervision.updates import observe_updates
from lockstep.supervision.witness import WitnessFiles, bear_witness

if sys.platform != "win32":
    # For people, to the terminal. Not SIGUSR1: Slurm sends that to announce the end of a job's time.
    STACK_DUMP_SIGNAL = signal.SIGUSR2


def main(arguments: list[str]) -> NoReturn:
    files = RankFiles.own()  # now: the script may change the environment
    if sys.platform != "win32":
        faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
    if files is not None:
        _show_pulse(files)
    if (observation := environment.observation()) is not None:
        _be_observed(observation)
    # Whole lines, at once: several ranks share a terminal, and a pipe would hold a dying rank's last words back.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)  # type: ignore[union-attr]
    code = 0
    try:
        run_target(arguments)
    except SystemExit as request:
        code = _exit_code(request)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException as error:  # asyncio's CancelledError is no Exception
        code = 1
        try:
            if files is not None:
                leave_report(error, files.report)  # the agent prints it, so that the culprit's traceback comes first
        except OSError:
            files = None
        if files is None:
            print(users_traceback(error), file=sys.stderr, end="")
    _leave(code, files)


def _show_pulse(files: RankFiles) -> None:
    """Have the agent see where this rank is, and its stacks when it asks for them."""
    pulse.begin(files.pulse)
    if "torch" in sys.modules:  # a warm rank: scripts that never import lockstep show their steps all the same
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: pulse.count_optimizer_step())
    pulse.enter(pulse.Phase.SCRIPT)
    if ASK_FOR_STACKS is not None:
        # Kept open for the life of the process: the dump is written by a signal handler, which can open nothing.
        stacks = os.open(files.stacks, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(ASK_FOR_STACKS, file=stacks, all_threads=True)
        listen(files)


def _be_observed(observation: environment.Observation) -> None:
    """By somebody who compares this job with another."""
    place = environment.read_placement()
    witness = WitnessFiles(observation.folder, place.rank)
    bear_witness(witness)
    if observation.runs is not None:  # a script: if it has a loop of lockstep's, that will say so
        observe_updates(witness, observation.steps, place.world_size)


def _exit_code(request: SystemExit) -> int:
    """As the interpreter reads it: nothing is success, text is a complaint."""
    if request.code is None or isinstance(request.code, int):
        return request.code or 0
    print(request.code, file=sys.stderr)
    return 1


def _leave(code: int, files: RankFiles | None) -> NoReturn:
    """End this process as the interpreter would, up to the point where only memory is left to tidy up.

    Beyond that point torch's gloo threads can abort a rank whose work is done: after DistributedDataParallel was used
    they outlive their process group, and a run that succeeded would end as one that was killed.
    """
    if code == 0:  # else where it failed is what its agent wants to know
        pulse.enter(pulse.Phase.LEAVING)
    if files is not None:
        # The rest can take seconds. Ranks that still wait for this one fail meanwhile, and are not to blame.
        with suppress(OSError):
            files.end.write_text(str(code))
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


def leave_report(error: BaseException, path: Path) -> None:
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


def users_traceback(error: BaseException) -> str:
    """The traceback from the user's first line on: the frames before it only push the cause off the screen."""
    trace = error.__traceback__
    while trace is not None and _is_before_the_users(trace.tb_frame):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _is_before_the_users(frame: FrameType) -> bool:
    package, _, module = str(frame.f_globals.get("__name__", "")).partition(".")
    if frame.f_code.co_filename in (runpy.__file__, "<frozen runpy>") or package == "typer":
        return True
    if package == "__main__":  # this module or the nursery; the script goes by that name too
        return Path(frame.f_code.co_filename).parent == Path(__file__).parent
    return package == "lockstep" and (module == "cli" or module.startswith(("commands.", "launcher.")))


def _shortened(text: str) -> str:
    """The beginning and the end of an overlong text: the agent reads a bounded report."""
    return text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT // 2]}\n…\n{text[-_MAX_TEXT // 2 :]}"


_MAX_TEXT = 40_000  # of each of two; a character may take 12 bytes


def _is_communication_failure(error: BaseException) -> bool:
    """Is this what a rank raises when *another* rank went away? Torch types such errors for NCCL, not for gloo."""
    names = {kind.__name__ for kind in type(error).__mro__}
    if names & {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _GLOO_SIGNS)


_GLOO_SIGNS = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Gloo connectFullMesh failed")

if __name__ == "__main__":
    main(sys.argv[1:])
