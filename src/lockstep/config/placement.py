"""Parse the variables of torchrun, Slurm and others into a process's rank, world size and address.

torchrun and `lockstep run` set RANK, WORLD_SIZE, LOCAL_RANK …; Slurm sets SLURM_PROCID …; people set the same names as
torchrun by hand; `torch.distributed.launch` passes an argument, `--local-rank`. Here all of these become one value,
`Placement`, and the rest of lockstep sees only that. `environment.py` reads the variables and passes them in.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

from lockstep.errors import WorldError

Launcher = Literal["none", "lockstep", "torchrun", "slurm", "hand-set"]
Role = Literal["agent", "worker", "single"]

LOOPBACK = "127.0.0.1"
DEFAULT_PORT = 29500

HOSTED_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"  # torch's name
AGENT_PID_VARIABLE = "LOCKSTEP_AGENT_PID"  # set by the lockstep agent for its workers
STORE_PORT_VARIABLE = "LOCKSTEP_STORE_PORT"  # likewise: MASTER_PORT, for comparison with what a script makes of it
STORE_FILE_VARIABLE = "LOCKSTEP_STORE_FILE"  # likewise: on one machine, the file through which the ranks meet
STORE_PREFIX_VARIABLE = "LOCKSTEP_STORE_PREFIX"  # likewise: on several, what the ranks' keys begin with, a secret

_LOCAL_RANK_ARGUMENT = re.compile(r"--local[-_]rank=(\d+)")


@dataclass(frozen=True)
class Placement:
    """This process's place in its job, as its launcher set it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node: int = 0
    num_nodes: int = 1
    master_addr: str = LOOPBACK
    master_port: int = DEFAULT_PORT
    launcher: Launcher = "none"
    store_is_hosted: bool = False  # an agent hosts the store at master_addr:master_port; otherwise rank 0 must
    store_file: str = ""  # the store is this file instead
    store_prefix: str = ""  # what all keys in the store begin with
    attempt: int = 0

    @property
    def is_on_one_machine(self) -> bool:
        """Do all processes of the job run on this machine?"""
        return is_loopback(self.master_addr)


@dataclass(frozen=True)
class MachineNode:
    """Which node of a job an agent's machine is, and the address at which the nodes meet."""

    index: int = 0  # of this machine, from 0
    count: int = 1  # machines in the job
    master_addr: str = LOOPBACK
    master_port: int = DEFAULT_PORT


def parse_role(nproc_given: bool, environ: Mapping[str, str]) -> Role:
    """Agent, worker or neither: `-n` makes an agent, unless a launcher has already numbered this process."""
    if nproc_given and "LOCAL_RANK" not in environ:
        return "agent"
    return "worker" if "RANK" in environ or _is_slurm_worker(environ) else "single"


def parse_placement(environ: Mapping[str, str], argv: Sequence[str]) -> Placement:
    """This process's place, from the variables of its launcher; a world of one if none are set."""
    if "RANK" in environ:
        return _from_rank_variables(environ, argv)
    if "SLURM_PROCID" in environ and _num_step_tasks(environ) > 1:
        return _from_slurm(environ)  # also with one task per machine: an agent does not call this
    if read_number(environ, "WORLD_SIZE", default=1) > 1:
        raise WorldError(f"WORLD_SIZE={environ['WORLD_SIZE']} but RANK is not set: set both, or neither")
    return Placement()


def parse_placement_for(rank: int, world_size: int, environ: Mapping[str, str]) -> Placement:
    """The placement of an explicit rank; `rank=-1, world_size=1` is a world of one.

    The address is MASTER_ADDR, or loopback.
    """
    if (rank, world_size) in ((-1, 1), (0, 1)):
        return Placement()
    _check_rank(rank, world_size, "rank", "world_size")
    master_addr = environ.get("MASTER_ADDR", LOOPBACK)
    is_on_one_machine = is_loopback(master_addr)
    return Placement(
        rank=rank,
        local_rank=read_number(environ, "LOCAL_RANK", default=rank),
        world_size=world_size,
        local_world_size=read_number(environ, "LOCAL_WORLD_SIZE", default=world_size if is_on_one_machine else 1),
        master_addr=master_addr,
        master_port=read_number(environ, "MASTER_PORT", default=DEFAULT_PORT),
        launcher="hand-set",
    )


def parse_node(nproc: int, environ: Mapping[str, str]) -> MachineNode:
    """Which node an agent's machine is.

    A RANK that is set by hand is the first rank of this machine (0, 4, … with WORLD_SIZE=8); a Slurm step numbers its
    nodes; with neither there is one machine.
    """
    if "RANK" in environ:
        first_rank = read_number(environ, "RANK")
        world_size = _required_number(environ, "WORLD_SIZE", f"RANK={first_rank} names this machine's first rank")
        _check_rank(first_rank, world_size, "RANK", "WORLD_SIZE")
        if world_size % nproc or first_rank % nproc:
            raise WorldError(
                f"RANK={first_rank} and WORLD_SIZE={world_size} must be multiples of -n {nproc}: "
                "if machines start different numbers of processes, use --nnodes and --node-rank instead"
            )
        if world_size == nproc:
            return MachineNode()
        return MachineNode(first_rank // nproc, world_size // nproc, *_master_address(environ))
    if _num_step_nodes(environ) > 1:
        return MachineNode(
            read_number(environ, "SLURM_NODEID"), _num_step_nodes(environ), *_slurm_master_address(environ)
        )
    return MachineNode()


def is_loopback(address: str) -> bool:
    """Is the address this machine's own, which others cannot reach?"""
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def without_local_rank(argv: Sequence[str]) -> list[str]:
    """The arguments without the `--local-rank=K` that `torch.distributed.launch` adds."""
    return [argument for argument in argv if not _LOCAL_RANK_ARGUMENT.fullmatch(argument)]


def _from_rank_variables(environ: Mapping[str, str], argv: Sequence[str]) -> Placement:
    rank = read_number(environ, "RANK")
    world_size = _required_number(environ, "WORLD_SIZE", f"RANK={rank}")
    _check_rank(rank, world_size, "RANK", "WORLD_SIZE")
    is_alone = world_size == 1 and "MASTER_ADDR" not in environ
    master_addr, master_port = (LOOPBACK, DEFAULT_PORT) if is_alone else _master_address(environ)
    is_on_one_machine = is_loopback(master_addr)
    local_rank = _local_rank(environ, argv, rank if is_on_one_machine else None)
    local_world_size = read_number(
        environ, "LOCAL_WORLD_SIZE", default=world_size if is_on_one_machine else local_rank + 1
    )
    if local_rank >= local_world_size:
        raise WorldError(
            f"LOCAL_RANK={local_rank} but LOCAL_WORLD_SIZE={local_world_size}: "
            "local ranks go from 0 to LOCAL_WORLD_SIZE - 1"
        )
    # A script, or a launcher that a rank starts, may have changed the port: then it makes a job of its own.
    is_agents = environ.get(STORE_PORT_VARIABLE) == environ.get("MASTER_PORT")
    if AGENT_PID_VARIABLE in environ:
        launcher: Launcher = "lockstep"
    else:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "hand-set"
    return Placement(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node=read_number(environ, "GROUP_RANK", default=rank // local_world_size),
        num_nodes=read_number(environ, "GROUP_WORLD_SIZE", default=-(-world_size // local_world_size)),
        master_addr=master_addr,
        master_port=master_port,
        launcher=launcher,
        store_is_hosted=environ.get(HOSTED_STORE_VARIABLE) == "True",
        store_file=environ.get(STORE_FILE_VARIABLE, "") if is_agents else "",
        store_prefix=environ.get(STORE_PREFIX_VARIABLE, "") if is_agents else "",
        attempt=read_number(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
    )


def _local_rank(environ: Mapping[str, str], argv: Sequence[str], default: int | None) -> int:
    if "LOCAL_RANK" in environ:
        return read_number(environ, "LOCAL_RANK")
    for argument in argv:
        if match := _LOCAL_RANK_ARGUMENT.fullmatch(argument):
            return int(match[1])
    if default is None:
        raise WorldError(
            f"LOCAL_RANK is not set and MASTER_ADDR={environ['MASTER_ADDR']} is not this machine's loopback: "
            "set LOCAL_RANK to this process's number on its machine, or launch with -n"
        )
    return default


def _master_address(environ: Mapping[str, str]) -> tuple[str, int]:
    if not environ.get("MASTER_ADDR"):
        raise WorldError(
            "MASTER_ADDR is not set: every process needs the address of rank 0's machine "
            f"(MASTER_ADDR={LOOPBACK} on one machine)"
        )
    port = _required_number(environ, "MASTER_PORT", f"MASTER_ADDR={environ['MASTER_ADDR']}", "set it too")
    if not 0 < port < 65536:
        raise WorldError(f"MASTER_PORT={port} is not a port: expected 1 to 65535")
    return environ["MASTER_ADDR"], port


def _is_slurm_worker(environ: Mapping[str, str]) -> bool:
    # With one task per node, the task is an agent; a batch script itself runs outside of any step.
    return "SLURM_PROCID" in environ and _num_step_tasks(environ) > _num_step_nodes(environ)


def _num_step_tasks(environ: Mapping[str, str]) -> int:
    return read_number(environ, "SLURM_STEP_NUM_TASKS", default=1)


def _num_step_nodes(environ: Mapping[str, str]) -> int:
    return read_number(environ, "SLURM_STEP_NUM_NODES", default=1)


def _from_slurm(environ: Mapping[str, str]) -> Placement:
    rank = read_number(environ, "SLURM_PROCID")
    world_size = read_number(environ, "SLURM_STEP_NUM_TASKS")
    _check_rank(rank, world_size, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    num_nodes = _num_step_nodes(environ)
    node = read_number(environ, "SLURM_NODEID", default=0)
    master_addr, master_port = _slurm_master_address(environ)
    return Placement(
        rank=rank,
        local_rank=_required_number(environ, "SLURM_LOCALID", f"SLURM_PROCID={rank}", "launch with srun"),
        world_size=world_size,
        local_world_size=_num_tasks_on_node(environ.get("SLURM_STEP_TASKS_PER_NODE", str(world_size)), node),
        node=node,
        num_nodes=num_nodes,
        master_addr=master_addr,
        master_port=master_port,
        launcher="slurm",
    )


def _slurm_master_address(environ: Mapping[str, str]) -> tuple[str, int]:
    # Every task derives the same port from the job; two jobs on one node get different ones.
    port = 20000 + read_number(environ, "SLURM_JOB_ID", default=0) % 20000
    address = environ.get("MASTER_ADDR")
    if not address:
        nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
        address = LOOPBACK if _num_step_nodes(environ) == 1 else _first_host(nodes)
    return address, read_number(environ, "MASTER_PORT", default=port)


def _first_host(nodelist: str) -> str:
    """The first name of Slurm's compact list: `n[03-07,9],login1` → `n03`."""
    match = re.match(r"([^,\[\]]+)(?:\[(\w+))?", nodelist)
    if match is None:
        raise WorldError(f"SLURM_STEP_NODELIST={nodelist!r} names no host: set MASTER_ADDR")
    return match[1] + (match[2] or "")


def _num_tasks_on_node(counts: str, node: int) -> int:
    """Slurm's `2(x3),1` means 2, 2, 2, 1 tasks on nodes 0 to 3."""
    expanded: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        expanded += [int(count)] * min(int(repeat or 1), node + 1)
    if node >= len(expanded):
        raise WorldError(f"SLURM_STEP_TASKS_PER_NODE={counts} has no entry for node {node}: launch with srun")
    return expanded[node]


def _check_rank(rank: int, world_size: int, rank_name: str, size_name: str) -> None:
    if world_size < 1:
        raise WorldError(f"{size_name}={world_size}: expected at least 1")
    if not 0 <= rank < world_size:
        raise WorldError(f"{rank_name}={rank} but {size_name}={world_size}: ranks go from 0 to {world_size - 1}")


def _required_number(environ: Mapping[str, str], name: str, because: str, remedy: str = "set both, or neither") -> int:
    if not environ.get(name):
        raise WorldError(f"{name} is not set, though {because}: {remedy}")
    return read_number(environ, name)


def read_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """A variable's whole number; `default` if it is unset or empty. A WorldError says what is wrong with it."""
    text = environ.get(name)
    if text is None or text == "":
        if default is None:
            raise WorldError(f"{name} is not set: expected a whole number")
        return default
    try:
        return int(text)
    except ValueError:
        raise WorldError(f"{name}={text[:40]!r}: expected a whole number") from None
