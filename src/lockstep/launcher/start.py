"""From launch options to a running agent. Importing this costs nothing: `--help` and bad options answer at once.

plan = LaunchPlan(nproc=2)
exit_code = start(plan, ["train.py", "--epochs", "3"])
"""

import sys
import threading
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from lockstep.errors import UserError
from lockstep.launcher.plan import LaunchPlan, check, node_of
from lockstep.launcher.processes import Processes


def start(plan: LaunchPlan, target: Sequence[str]) -> int:
    """Run `target` (a script and its arguments, or `-m module …`) on the plan's processes; return the exit code."""
    if sys.platform != "linux":
        raise UserError(
            f"several processes are started on Linux only, and this is {sys.platform}: leave -n (nproc) away"
        )
    if threading.current_thread() is not threading.main_thread():
        raise UserError("several processes (nproc) are started from the main thread only, which hears the signals")
    check(plan)
    check_target(target)
    processes = Processes(target, is_warm=plan.supervision.is_warm)
    try:
        processes.prepare()  # it imports torch, as we do next: side by side
        # Costs a second: only now, when everything cheap has been checked.
        from lockstep.launcher.agent import count_devices, run_agent

        nproc = count_devices() if plan.nproc == "auto" else plan.nproc
        return run_agent(processes, nproc, node_of(plan, nproc), plan.supervision, rdzv_endpoint=plan.rdzv_endpoint)
    finally:
        processes.close()


def check_target(target: Sequence[str]) -> None:
    if target[0] != "-m":
        if not Path(target[0]).is_file():
            raise UserError(f"{target[0]}: no such script")
        return
    package, _, _ = target[1].partition(".")
    # The outermost name alone: looking further would import the package.
    if PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None and package not in sys.builtin_module_names:
        raise UserError(f"-m {target[1]}: no module named {package}")
