"""Environment variables: the only module that reads or writes them.

`placement.py` parses what launchers set: the functions `read_…` here pass the process's environment to the functions
`parse_…` there, which take any mapping, so that tests need not change the environment.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import placement
from lockstep.config.placement import (
    AGENT_PID_VARIABLE,
    HOSTED_STORE_VARIABLE,
    STORE_PORT_VARIABLE,
    MachineNode,
    Placement,
    Role,
    read_number,
)

# Set by the lockstep agent for its workers.
SUPERVISION_FOLDER_VARIABLE = "LOCKSTEP_SUPERVISION"
SPAWNED_BY_LAUNCH_VARIABLE = "LOCKSTEP_SPAWNED_BY_LAUNCH"
RESTARTED_AFTER_VARIABLE = "LOCKSTEP_RESTARTED_AFTER"

# Set by `lockstep verify` for the processes that it compares.
VERIFY_FOLDER_VARIABLE = "LOCKSTEP_OBSERVED"
VERIFY_RUNS_VARIABLE = "LOCKSTEP_OBSERVED_RUNS"
VERIFY_STEPS_VARIABLE = "LOCKSTEP_OBSERVED_STEPS"

# Set by the user: a folder in shared memory, if it is not /dev/shm.
MEMORY_FOLDER_VARIABLE = "LOCKSTEP_MEMORY"

# Variables that say how the processes of a job find each other, communicate and compute.
_JOB_NAMES = frozenset(
    {
        "CUBLAS_WORKSPACE_CONFIG",
        "CUDA_VISIBLE_DEVICES",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "MKL_NUM_THREADS",
        "OMP_NUM_THREADS",
        "RANK",
        "WORLD_SIZE",
    }
)
_JOB_PREFIXES = ("NCCL_", "GLOO_")

# Variables that place a process in a job.
_PLACE_NAMES = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "SLURM_NODEID",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_NODES",
        "SLURM_STEP_NUM_TASKS",
        "WORLD_SIZE",
    }
)


@dataclass(frozen=True)
class VerifyRequest:
    """What `lockstep verify` asks of a process that it compares with another."""

    folder: Path  # where each rank records what it prints, writes and computes
    runs: Path | None = None  # replaces a script's own run folders; None if it is not a script
    steps: int = 0  # stop a script after this many


def read_role(nproc_given: bool) -> Role:
    """Is this process an agent, a worker, or neither? `nproc_given`: it was started with `-n`."""
    return placement.parse_role(nproc_given, os.environ)


def read_placement() -> Placement:
    """This process's rank, world size and address, from its launcher's variables; a world of one if none are set."""
    return placement.parse_placement(os.environ, sys.argv)


def read_placement_for(rank: int, world_size: int) -> Placement:
    """The placement of an explicit rank and world size; the address is MASTER_ADDR, or loopback."""
    return placement.parse_placement_for(rank, world_size, os.environ)


def read_node(nproc: int) -> MachineNode:
    """Which node of the job this machine is, for an agent that starts `nproc` processes on it."""
    return placement.parse_node(nproc, os.environ)


def variable(name: str) -> str | None:
    """The value of a variable; None if it is not set."""
    return os.environ.get(name)


def threads_per_process(default: int = 1) -> int:
    """OMP_NUM_THREADS where the user set it; otherwise a constant, never cores divided by processes."""
    return read_number(os.environ, "OMP_NUM_THREADS", default=default)


def agent_pid() -> int | None:
    """The process id of the lockstep agent that started this process, if one did."""
    pid = os.environ.get(AGENT_PID_VARIABLE)
    return int(pid) if pid else None


def supervision_folder() -> Path | None:
    """The folder for messages between this worker and its agent, if it has one."""
    folder = os.environ.get(SUPERVISION_FOLDER_VARIABLE)
    return Path(folder) if folder else None


def read_verify_request() -> VerifyRequest | None:
    """What `lockstep verify` asks of this process; None outside of it."""
    folder, runs = os.environ.get(VERIFY_FOLDER_VARIABLE), os.environ.get(VERIFY_RUNS_VARIABLE)
    if not folder:
        return None
    return VerifyRequest(
        Path(folder), Path(runs) if runs else None, read_number(os.environ, VERIFY_STEPS_VARIABLE, default=0)
    )


def verify_variables(request: VerifyRequest) -> dict[str, str]:
    """The variables that pass `request` to a child process."""
    runs = {} if request.runs is None else {VERIFY_RUNS_VARIABLE: str(request.runs)}
    return {VERIFY_FOLDER_VARIABLE: str(request.folder), VERIFY_STEPS_VARIABLE: str(request.steps), **runs}


def restart_cause() -> str | None:
    """Why the previous attempt failed, if the lockstep agent restarted this process."""
    return os.environ.get(RESTARTED_AFTER_VARIABLE)


def shared_memory_root() -> Path | None:
    """A writable folder in memory rather than on disk: LOCKSTEP_MEMORY or /dev/shm; None if there is none."""
    folder = Path(os.environ.get(MEMORY_FOLDER_VARIABLE) or "/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) else None


def may_be_restarted() -> bool:
    """Does the agent that started this process, lockstep's or torchrun's, restart it if a rank dies?"""
    return read_number(os.environ, "TORCHELASTIC_MAX_RESTARTS", default=0) > 0


def is_port_of_no_store(port: str | None) -> bool:
    """Would a process that joins a job at this port (None: at MASTER_PORT) wait for a store that no process hosts?

    So it would in a process of our agent, at any port but that of the agent's store: torch then hosts none.
    """
    hosted = os.environ.get(STORE_PORT_VARIABLE)
    is_agents = os.environ.get(HOSTED_STORE_VARIABLE) == "True"
    return is_agents and hosted is not None and (port or os.environ.get("MASTER_PORT")) != hosted


def is_same_job(place: Placement, rank: str | None, world_size: str | None) -> bool:
    """Does a process of this placement join its own job, if it joins with these numbers (None: RANK, WORLD_SIZE)?"""
    asked = (rank or os.environ.get("RANK"), world_size or os.environ.get("WORLD_SIZE"), os.environ.get("MASTER_PORT"))
    return asked == (str(place.rank), str(place.world_size), str(place.master_port))


def is_port_of_agent(port: int) -> bool:
    """Does the agent that started this process host the store of its job at this port?"""
    return os.environ.get(STORE_PORT_VARIABLE) == str(port)


def is_spawned_by_launch() -> bool:
    """Did `lockstep.launch(main, nproc=N)` start this process as a copy of its script?"""
    return SPAWNED_BY_LAUNCH_VARIABLE in os.environ


def is_launched() -> bool:
    """Did a launcher, lockstep's agent or torchrun, start this process?"""
    return any(name in os.environ for name in (AGENT_PID_VARIABLE, "TORCHELASTIC_RUN_ID"))


def hand_set_rank() -> int:
    """The rank that RANK, or else a Slurm step, gives this process; 0 if none does."""
    return read_number(os.environ, "RANK", default=read_number(os.environ, "SLURM_PROCID", default=0))


def forget_hand_set_job() -> None:
    """Remove the variables that place this process in a job."""
    for name in _PLACE_NAMES:
        os.environ.pop(name, None)


def interface_variables(interface: str | None, *, one_machine: bool) -> dict[str, str]:
    """The variables that bind gloo, and on one machine NCCL too, to an interface, unless the user chose one."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if one_machine else ("GLOO_SOCKET_IFNAME",)
    return {name: interface for name in names if interface is not None and name not in os.environ}


def export_master_address(place: Placement, interface: str | None) -> None:
    """Set MASTER_ADDR and MASTER_PORT for code that reads them itself, and bind the job to `interface`."""
    os.environ["MASTER_ADDR"] = place.master_addr
    os.environ["MASTER_PORT"] = str(place.master_port)
    os.environ.update(interface_variables(interface, one_machine=place.is_on_one_machine))


@contextmanager
def temporary_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables inside the block, so that child processes started there inherit them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def set_cublas_workspace() -> None:
    """Give cuBLAS a fixed workspace, without which its results are not reproducible, unless the user has set one.

    Call it before cuBLAS is first used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_nccl_debug(level: str | None) -> None:
    """Set NCCL_DEBUG, which NCCL reads when the first process group is made; None leaves it unchanged."""
    if level is not None:
        os.environ["NCCL_DEBUG"] = level


def job_variables() -> dict[str, str]:
    """The job's variables that are set, to be shown or saved; no others, since those may hold secrets."""
    names = [name for name in os.environ if name in _JOB_NAMES or name.startswith(_JOB_PREFIXES)]
    # NCCL_VERSION and the like are set by container images and do not configure the job.
    return {name: os.environ[name] for name in names if not name.endswith("_VERSION")}


def all_variables() -> dict[str, str]:
    """A copy of all variables."""
    return dict(os.environ)


def replace_variables(variables: Mapping[str, str]) -> None:
    """Replace all variables with another process's."""
    os.environ.clear()
    os.environ.update(variables)
