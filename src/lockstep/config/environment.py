"""The one file that reads and writes the process environment: a job's variables, lockstep's own, and the user's."""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lockstep.config import placement
from lockstep.config.placement import AGENT_PID, Node, Placement, Role, read_number

# Set by our agent for its workers.
SUPERVISION_FOLDER = "LOCKSTEP_SUPERVISION"
SPAWNED_BY_LAUNCH = "LOCKSTEP_SPAWNED_BY_LAUNCH"
RESTARTED_AFTER = "LOCKSTEP_RESTARTED_AFTER"

# Set by `lockstep verify` for the processes whose work it compares.
OBSERVED = "LOCKSTEP_OBSERVED"
OBSERVED_RUNS = "LOCKSTEP_OBSERVED_RUNS"
OBSERVED_STEPS = "LOCKSTEP_OBSERVED_STEPS"

# Set by the user: where shared memory is, if not in the usual place.
MEMORY_FOLDER = "LOCKSTEP_MEMORY"

# Those that say how processes find each other, talk and compute.
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


@dataclass(frozen=True)
class Observation:
    """What somebody wants to see of a job who compares it with another."""

    folder: Path  # for what each rank prints, writes and computes
    runs: Path | None = None  # instead of the folders that a script's runs have; None: it is not a script
    steps: int = 0  # after which a script ends


def role(nproc_given: bool) -> Role:
    """Agent, worker or neither, as the variables have it."""
    return placement.role(nproc_given, os.environ)


def read_placement() -> Placement:
    """This process's place, from whichever launcher's variables are set; a world of one if none are."""
    return placement.read_placement(os.environ, sys.argv)


def placement_of(rank: int, world_size: int) -> Placement:
    """The place a caller names; the address is the environment's, or loopback."""
    return placement.placement_of(rank, world_size, os.environ)


def read_node(nproc: int) -> Node:
    """The machine of an agent that starts so many processes."""
    return placement.read_node(nproc, os.environ)


def variable(name: str) -> str | None:
    """A variable a config refers to by `${NAME}`."""
    return os.environ.get(name)


def threads_per_process(default: int = 1) -> int:
    """OMP_NUM_THREADS where the user set it; otherwise a constant, never cores divided by processes."""
    return read_number(os.environ, "OMP_NUM_THREADS", default=default)


def agent_pid() -> int | None:
    """The process id of the lockstep agent that started this process, if one did."""
    pid = os.environ.get(AGENT_PID)
    return int(pid) if pid else None


def supervision_folder() -> Path | None:
    """Where this worker and its agent leave each other word, if it has one."""
    folder = os.environ.get(SUPERVISION_FOLDER)
    return Path(folder) if folder else None


def observation() -> Observation | None:
    """What is to be seen of this process, if it is looked at."""
    folder, runs = os.environ.get(OBSERVED), os.environ.get(OBSERVED_RUNS)
    if not folder:
        return None
    return Observation(Path(folder), Path(runs) if runs else None, read_number(os.environ, OBSERVED_STEPS, default=0))


def observing(observation: Observation) -> dict[str, str]:
    """The variables that say so."""
    runs = {} if observation.runs is None else {OBSERVED_RUNS: str(observation.runs)}
    return {OBSERVED: str(observation.folder), OBSERVED_STEPS: str(observation.steps), **runs}


def restarted_after() -> str | None:
    """What the attempt before failed of, if our agent has started this one in its place."""
    return os.environ.get(RESTARTED_AFTER)


def memory_folder() -> Path | None:
    """Where files lie in memory rather than on a disk, if there is such a place that we may write to."""
    folder = Path(os.environ.get(MEMORY_FOLDER) or "/dev/shm")
    return folder if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) else None


def may_be_restarted() -> bool:
    """Does the agent that started this process, ours or torchrun's, start it again if one of the ranks dies?"""
    return read_number(os.environ, "TORCHELASTIC_MAX_RESTARTS", default=0) > 0


def spawned_by_launch() -> bool:
    """Did `lockstep.launch(main, nproc=N)` start this process as a copy of its script?"""
    return SPAWNED_BY_LAUNCH in os.environ


def pin_to(interface: str | None, *, one_machine: bool) -> dict[str, str]:
    """The variables that keep gloo, and on one machine NCCL too, on an interface, unless the user chose one."""
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if one_machine else ("GLOO_SOCKET_IFNAME",)
    return {name: interface for name in names if interface is not None and name not in os.environ}


def settle(place: Placement, interface: str | None) -> None:
    """Make the meeting point visible to code that reads it itself, and keep the job on the interface it is met over."""
    os.environ["MASTER_ADDR"] = place.master_addr
    os.environ["MASTER_PORT"] = str(place.master_port)
    os.environ.update(pin_to(interface, one_machine=place.one_machine))


@contextmanager
def exported(variables: Mapping[str, str]) -> Iterator[None]:
    """Variables that child processes started in this block inherit."""
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


def choose_cublas_workspace() -> None:
    """cuBLAS repeats its bits only with a fixed workspace, chosen before its first use; a user's own choice stays."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def set_nccl_debug(level: str | None) -> None:
    """NCCL reads it when the first process group is made. None: it stays as it is."""
    if level is not None:
        os.environ["NCCL_DEBUG"] = level


def job_variables() -> dict[str, str]:
    """Those of a job's that are set; any others may hold secrets."""
    names = [name for name in os.environ if name in _JOB_NAMES or name.startswith(_JOB_PREFIXES)]
    return {name: os.environ[name] for name in names if not name.endswith("_VERSION")}  # which an image may tell


def snapshot() -> dict[str, str]:
    """All variables, as they are now."""
    return dict(os.environ)


def replace(variables: Mapping[str, str]) -> None:
    """Take over another process's variables, and drop all others."""
    os.environ.clear()
    os.environ.update(variables)
