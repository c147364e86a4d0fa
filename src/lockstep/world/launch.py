"""`lockstep.launch(main)`: run a script's `main(world)` in one process or on many."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from lockstep.config import environment
from lockstep.config.placement import without_local_rank
from lockstep.errors import LockstepError, UserError, print_error
from lockstep.launcher.launch_plan import LaunchPlan, start_agent
from lockstep.world.process_group import leave_on_exit, setup_distributed
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
    if environment.read_role(nproc_given=nproc is not None) == "agent":
        assert nproc is not None
        with environment.temporary_variables({environment.SPAWNED_BY_LAUNCH_VARIABLE: "1"}):
            try:
                exit_code = start_agent(LaunchPlan(nproc=nproc), _this_script())
            except LockstepError as error:
                if is_interactive():
                    raise
                exit_code = print_error(error)
        if exit_code != 0:
            sys.exit(exit_code)
        return
    torch.set_num_threads(environment.threads_per_process())
    try:
        with leave_on_exit():
            world = setup_distributed(backend=backend, timeout_s=timeout_s, device=device)
            sys.argv = without_local_rank(sys.argv)
            main(world)
    except LockstepError as error:
        if environment.agent_pid() is not None or is_interactive():
            raise  # the agent prints it once for all ranks; a notebook prints it by itself
        sys.exit(print_error(error))
    if environment.is_spawned_by_launch():
        sys.exit(0)


def is_interactive() -> bool:
    """Is this a prompt or a notebook? There errors are raised: ending the process would end the user's session."""
    return hasattr(sys, "ps1")


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
