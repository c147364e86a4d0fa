"""From launch options to a running agent. Importing this costs nothing: `--help` and bad options answer at once.

plan = LaunchPlan(nproc=2)
exit_code = start(plan, ["train.py", "--epochs", "3"])
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from lockstep.config import environment
from lockstep.config.environment import Node
from lockstep.errors import UserError


@dataclass(frozen=True)
class LaunchPlan:
    """How many processes, on which machine of how many. The names are torchrun's."""

    nproc: int | Literal["auto"] = 1
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_endpoint: str | None = None
    max_restarts: int = 0


def start(plan: LaunchPlan, target: Sequence[str]) -> int:
    """Run `target` (a script and its arguments, or `-m module …`) on the plan's processes; return the exit code."""
    _check(plan)
    check_target(target)
    # Imports torch, and so costs a second: only now, when everything cheap has been checked.
    from lockstep.launcher.agent import count_devices, run_agent

    nproc = count_devices() if plan.nproc == "auto" else plan.nproc
    node = node_of(plan, nproc)
    command = [sys.executable, "-m", "lockstep.launcher.worker", *target]
    return run_agent(command, nproc, node, max_restarts=plan.max_restarts, rdzv_endpoint=plan.rdzv_endpoint)


def check_target(target: Sequence[str]) -> None:
    if target[0] != "-m":
        if not Path(target[0]).is_file():
            raise UserError(f"{target[0]}: no such script")
        return
    package, _, _ = target[1].partition(".")
    # The outermost name alone: looking further would import the package.
    if PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None and package not in sys.builtin_module_names:
        raise UserError(f"-m {target[1]}: no module named {package}")


def _check(plan: LaunchPlan) -> None:
    if plan.nproc != "auto" and plan.nproc < 1:
        raise UserError(f"--nproc-per-node {plan.nproc}: expected at least 1, or auto")
    if plan.nnodes is not None and plan.nnodes < 1:
        raise UserError(f"--nnodes {plan.nnodes}: expected at least 1")
    if plan.max_restarts < 0:
        raise UserError(f"--max-restarts {plan.max_restarts}: expected 0 or more")
    if plan.master_port is not None and not 0 < plan.master_port < 65536:
        raise UserError(f"--master-port {plan.master_port}: expected 1 to 65535")
    several = plan.nnodes is not None and plan.nnodes > 1
    if plan.node_rank is not None and not 0 <= plan.node_rank < (plan.nnodes or 1):
        raise UserError(f"--node-rank {plan.node_rank} but --nnodes {plan.nnodes or 1}: machines count from 0")
    if several and plan.rdzv_endpoint is None and (plan.node_rank is None or plan.master_addr is None):
        raise UserError(
            f"--nnodes {plan.nnodes} needs --node-rank and --master-addr (the address of machine 0), or --rdzv-endpoint"
        )
    if plan.rdzv_endpoint is not None and not re.fullmatch(r".+:\d{1,5}", plan.rdzv_endpoint):
        raise UserError(f"--rdzv-endpoint {plan.rdzv_endpoint}: expected HOST:PORT")
    if not several and plan.rdzv_endpoint is not None:
        raise UserError("--rdzv-endpoint is where several machines meet: give --nnodes too")


def node_of(plan: LaunchPlan, nproc: int) -> Node:
    """This machine's place in the job: as the options say, else as the environment does."""
    if plan.nnodes is None:
        return environment.read_node(nproc)
    host, _, _ = (plan.rdzv_endpoint or "").rpartition(":")
    return Node(
        plan.node_rank or 0,
        plan.nnodes,
        plan.master_addr or host or environment.LOOPBACK,
        plan.master_port or environment.DEFAULT_PORT,
    )
