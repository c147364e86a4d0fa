"""The options of a launch, their checks, and the start of the agent that carries them out.

Importing this is cheap (no torch), so `--help` and errors about options appear at once.

    exit_code = start_agent(LaunchPlan(nproc=2), ["train.py", "--epochs", "3"])
"""

import math
import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Literal

from lockstep.config import environment
from lockstep.config.placement import DEFAULT_PORT, LOOPBACK, MachineNode
from lockstep.config.plurals import count_noun
from lockstep.errors import UserError
from lockstep.launcher.rank_processes import RankProcesses
from lockstep.supervision.process_title import describe_target, titled_agent
from lockstep.terminal_text import print_line

OnHang = Literal["restart", "stop", "report"]

# Generous: an agent of two ranks has about 20 files open, and each rank 27; data workers add theirs.
_OPEN_FILES = 64
_OPEN_FILES_PER_RANK = 8


@dataclass(frozen=True)
class SupervisionOptions:
    """What an agent does on failures, hangs and stop requests."""

    max_restarts: int = 0  # without progress
    min_nproc: int | None = None  # if restarts do not help, continue with fewer processes, but at least this many
    grace_s: float = 30.0  # for ranks to end by themselves after a stop request
    hang_limit_s: float | None = 30.0  # without a sign of life; None: do not look for hangs
    hang_stop_s: float | None = 1800.0  # without one, before a job that may be healthy ends; None: it never does
    on_hang: OnHang | None = None  # when it ends; None: restart what can resume, stop anything else
    is_warm: bool = True  # ranks have torch imported when they start: [Note: fork server]
    incidents: Path | None = None  # folder for reports if the job has no run folder


@dataclass(frozen=True)
class LaunchPlan:
    """How many processes to start, and on which of how many machines. The names are torchrun's."""

    nproc: int | Literal["auto"] = 1
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_endpoint: str | None = None
    supervision: SupervisionOptions = SupervisionOptions()


def start_agent(plan: LaunchPlan, target: Sequence[str]) -> int:
    """Run `target` (a script and its arguments, or `-m module …`) on the plan's processes; return the exit code."""
    if sys.platform != "linux":
        raise UserError(f"several processes can be started on Linux only, and this is {sys.platform}: omit -n (nproc)")
    if threading.current_thread() is not threading.main_thread():
        raise UserError(
            "several processes (nproc) can be started from the main thread only, which receives the signals: "
            "launch them there"
        )
    check_plan(plan)
    check_target(target)
    _check_open_files(1 if plan.nproc == "auto" else plan.nproc)
    processes = RankProcesses(target, is_warm=plan.supervision.is_warm)
    try:
        processes.prepare()  # the fork server imports torch while we do
        # This takes a second, so do it only when everything cheap has been checked.
        from lockstep.launcher.agent import count_devices, run_agent

        nproc = count_devices() if plan.nproc == "auto" else plan.nproc
        node = node_of(plan, nproc)
        if node.count == 1 and (unused := _given_address(plan)):
            print_line(
                f"lockstep: not used: {unused}; without several machines (--nnodes), every start takes a free port",
                file=sys.stderr,
            )
        with titled_agent(describe_target(target)):
            return run_agent(processes, nproc, node, plan.supervision, rdzv_endpoint=plan.rdzv_endpoint)
    finally:
        processes.close()


def check_plan(plan: LaunchPlan) -> None:
    """Raise a `UserError` for an option that is impossible, alone or with the others."""
    if plan.nproc != "auto" and plan.nproc < 1:
        raise UserError(f"--nproc-per-node {plan.nproc}: expected at least 1, or auto")
    if plan.nnodes is not None and plan.nnodes < 1:
        raise UserError(f"--nnodes {plan.nnodes}: expected at least 1")
    _check_supervision(plan.supervision)
    min_nproc = plan.supervision.min_nproc
    if min_nproc is not None and (min_nproc < 1 or (plan.nproc != "auto" and min_nproc > plan.nproc)):
        raise UserError(f"-n {min_nproc}:{plan.nproc}: expected MIN:MAX, as in 2:4")
    if plan.master_port is not None and not 0 < plan.master_port < 65536:
        raise UserError(f"--master-port {plan.master_port}: expected 1 to 65535")
    has_several_nodes = plan.nnodes is not None and plan.nnodes > 1
    if plan.node_rank is not None and not 0 <= plan.node_rank < (plan.nnodes or 1):
        raise UserError(f"--node-rank {plan.node_rank} but --nnodes {plan.nnodes or 1}: machines count from 0")
    if has_several_nodes and plan.rdzv_endpoint is None and (plan.node_rank is None or plan.master_addr is None):
        raise UserError(
            f"--nnodes {plan.nnodes} needs --node-rank and --master-addr (the address of machine 0), or --rdzv-endpoint"
        )
    if plan.rdzv_endpoint is not None and not re.fullmatch(r".+:\d{1,5}", plan.rdzv_endpoint):
        raise UserError(f"--rdzv-endpoint {plan.rdzv_endpoint}: expected HOST:PORT")
    if not has_several_nodes and plan.rdzv_endpoint is not None:
        raise UserError(f"--rdzv-endpoint {plan.rdzv_endpoint} is for several machines: give --nnodes too")


def _check_supervision(options: SupervisionOptions) -> None:
    if options.max_restarts < 0:
        raise UserError(f"--max-restarts {options.max_restarts}: expected 0 or more")
    if not 0 <= options.grace_s < math.inf:
        raise UserError(f"--grace {options.grace_s}: expected a number of seconds, 0 or more")
    if options.hang_limit_s is not None and not 0 < options.hang_limit_s < math.inf:
        raise UserError(f"--hang-limit {options.hang_limit_s:g}: expected a number of seconds above 0, or off")
    if options.hang_stop_s is not None and not 0 < options.hang_stop_s < math.inf:
        raise UserError(f"--hang-stop {options.hang_stop_s:g}: expected a number of seconds above 0, or off")


def _check_open_files(nproc: int) -> None:
    """Raise a `UserError` if so few files may be open at a time that the agent, or torch in the ranks, would fail."""
    import resource  # does not exist on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OPEN_FILES + _OPEN_FILES_PER_RANK * nproc
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UserError(
            f"at most {limit} files may be open at a time here, and {count_noun(nproc, 'process')} may need {needed}: "
            "raise the limit with `ulimit -n`"
        )


def check_target(target: Sequence[str]) -> None:
    """Raise a `UserError` if the script, or the package of `-m module`, does not exist."""
    if target[0] != "-m":
        if (problem := _problem_with_script(Path(target[0]))) is not None:
            raise UserError(f"{target[0]}: {problem}")
        return
    package, _, _ = target[1].partition(".")
    # Only the top-level package: looking for a submodule would import it.
    if PathFinder.find_spec(package, [str(Path.cwd()), *sys.path]) is None and package not in sys.builtin_module_names:
        raise UserError(f"-m {target[1]}: no module named {package}")


def _problem_with_script(script: Path) -> str | None:
    if script.suffix == ".ipynb":
        return "a notebook is not a script: `jupyter nbconvert --to script` makes one of it"
    if script.suffix in (".yaml", ".yml"):
        return f"a config is not a script: `lockstep train {script}` trains it"
    if script.is_dir() and not (script / "__main__.py").exists():
        return "a folder, not a script: name the script in it"
    if script.exists():
        return None
    if script.name.startswith("-"):
        return "neither a script nor an option of `lockstep run`: see its --help"
    if script.name.startswith("python") or script.name in ("torchrun", "accelerate"):
        return "no such script: `lockstep run` starts Python and the processes itself, so name the script alone"
    return "no such script"


def _given_address(plan: LaunchPlan) -> str:
    """Return the options for an address that machines meet at, as they were given; empty if none was."""
    given = {"--master-addr": plan.master_addr, "--master-port": plan.master_port}
    return " ".join(f"{option} {value}" for option, value in given.items() if value is not None)


def node_of(plan: LaunchPlan, nproc: int) -> MachineNode:
    """Return this machine's place in the job, from the options or else from the environment."""
    if plan.nnodes is None:
        node = environment.read_node(nproc)
        if node.count == 1:
            return node
        address = plan.master_addr or node.master_addr
        return replace(node, master_addr=address, master_port=plan.master_port or node.master_port)
    host, _, _ = (plan.rdzv_endpoint or "").rpartition(":")
    return MachineNode(
        plan.node_rank or 0,
        plan.nnodes,
        plan.master_addr or host or LOOPBACK,
        plan.master_port or DEFAULT_PORT,
    )
