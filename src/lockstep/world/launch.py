"""`lockstep.launch`: from a plain script to `main(world)` on one process or many."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from lockstep.config import environment
from lockstep.config.placement import without_local_rank
from lockstep.errors import LockstepError, UserError, complain
from lockstep.launcher.plan import LaunchPlan
from lockstep.launcher.start import start
from lockstep.world.setup import leaving_at_the_end, setup_distributed
from lockstep.world.world import World


def launch(
    main: Callable[[World], object],
    nproc: int | Literal["auto"] | None = None,
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    device: str | None = None,
) -> None:
    """Run `main(world)` as one process, as a worker of whatever launcher started us, or on `nproc` new processes.

    With `nproc` (or `"auto"`: one per device) the script becomes an agent that starts copies of itself and returns when
    all are done; code after `launch` then runs once, in the agent. Guard the call with `if __name__ == "__main__":`.
    """
    if environment.role(nproc_given=nproc is not None) == "agent":
        assert nproc is not None
        with environment.exported({environment.SPAWNED_BY_LAUNCH: "1"}):
            try:
                exit_code = start(LaunchPlan(nproc=nproc), _this_script())
            except LockstepError as error:
                if is_interactive():
                    raise
                exit_code = complain(error)
        if exit_code != 0:
            sys.exit(exit_code)
        return
    torch.set_num_threads(environment.threads_per_process())
    try:
        with leaving_at_the_end():
            world = setup_distributed(backend=backend, timeout_s=timeout_s, device=device)
            sys.argv = without_local_rank(sys.argv)
            main(world)
    except LockstepError as error:
        if environment.agent_pid() is not None or is_interactive():
            raise  # its agent tells, once for all ranks; a notebook tells by itself
        sys.exit(complain(error))
    if environment.spawned_by_launch():
        sys.exit(0)


def is_interactive() -> bool:
    """At a prompt or in a notebook, ending the process would end the user's work: the error is raised instead."""
    return hasattr(sys, "ps1")


def _this_script() -> list[str]:
    """How to start this very script again: `python script.py …` or `python -m package.module …`."""
    module = sys.modules["__main__"]
    spec = getattr(module, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__"), *sys.argv[1:]]
    script = getattr(module, "__file__", None)
    if script is None:
        raise UserError(
            "launch(main, nproc=…) starts copies of a script, and a notebook or a prompt is none: put main into a file "
            "and start that, `!lockstep run -n 2 FILE.py`, or leave nproc away and train in this process"
        )
    return [str(Path(script).resolve()), *sys.argv[1:]]
