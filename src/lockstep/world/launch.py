"""`lockstep.launch(main)`: run a script's `main(world)` in one process or on many."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from lockstep.config import environment
from lockstep.config.argument_checks import require_count
from lockstep.config.placement import without_local_rank
from lockstep.errors import LockstepError, Stopped, UserError, print_error
from lockstep.launcher.launch_plan import LaunchPlan, start_agent
from lockstep.supervision.output_streams import keep_failing_streams
from lockstep.supervision.stop_signals import ignore_stop_signals
from lockstep.world.process_group import leave_on_exit, setup_distributed
from lockstep.world.script_process import choose_threads, is_interactive
from lockstep.world.world import World


def launch(
    main: Callable[[World], object],
    nproc: int | Literal["auto"] | None = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    device: str | None = None,
) -> None:
    """Run `main(world)` as one process, as a worker of the launcher that started it, or on `nproc` new processes.

    With `nproc` the script becomes an agent that starts copies of itself and returns when all of them are done; code
    after `launch` then runs once, in the agent. If a process fails, the script ends with one of lockstep's exit codes.

    Without `nproc`, a `LockstepError` is printed in one line and ends the process; other exceptions are raised.

    Example:
        def main(world: lockstep.World) -> None:
            print(f"rank {world.rank} of {world.size} on {world.device}")

        if __name__ == "__main__":
            lockstep.launch(main)

    Args:
        main: the function to run; it is given this process's `World`.
        nproc: the number of processes to start, or "auto" for one per device. If omitted, none is started.
        backend: "nccl" or "gloo"; chosen by the device if omitted.
        timeout_s: the time limit for joining the job and for every collective.
        device: "cpu", "cuda", "cuda:N" or "mps"; chosen automatically if omitted.
    """
    keep_failing_streams()
    with _errors_end_the_script():
        _check_arguments(main, nproc)
        if environment.read_role(nproc_given=nproc is not None) == "agent":
            assert nproc is not None
            with environment.temporary_variables({environment.SPAWNED_BY_LAUNCH_VARIABLE: "1"}):
                exit_code = start_agent(LaunchPlan(nproc=nproc), _this_script())
            if exit_code != 0:
                sys.exit(exit_code)
            return
        choose_threads()  # [Note: one contract]
        with leave_on_exit():
            world = setup_distributed(backend=backend, timeout_s=timeout_s, device=device)
            sys.argv = without_local_rank(sys.argv)
            main(world)
    if environment.is_spawned_by_launch():
        sys.exit(0)


@contextmanager
def _errors_end_the_script() -> Iterator[None]:
    """Print a `LockstepError` and exit, but in a rank, whose agent prints it once for all, and in a notebook."""
    try:
        yield
    except LockstepError as error:
        if environment.agent_pid() is not None or is_interactive():
            raise
        if isinstance(error, Stopped):
            ignore_stop_signals()
        sys.exit(print_error(error))


def _check_arguments(main: object, nproc: object) -> None:
    if not callable(main):
        raise UserError(
            f"launch(main): main is of type {type(main).__name__}: give the function itself, without calling it"
        )
    with suppress(ValueError):  # a builtin without a signature
        parameters = inspect.signature(main)
        try:
            parameters.bind(World())
        except TypeError:
            raise UserError(
                f"launch(main): main{parameters} is called with one argument, the World: write `def main(world):`"
            ) from None
    if nproc is not None and nproc != "auto":
        require_count("nproc", nproc)


def _this_script() -> list[str]:
    """The arguments that start this script again: `python script.py …` or `python -m package.module …`."""
    module = sys.modules["__main__"]
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    script = getattr(module, "__file__", None)
    if script is None:
        raise UserError(
            "launch(main, nproc=…) starts copies of a script, and this is a notebook or a prompt: put main into a file "
            "and run `!lockstep run -n 2 FILE.py`, or omit nproc to train in this process"
        )
    return [str(Path(script).resolve()), *sys.argv[1:]]
