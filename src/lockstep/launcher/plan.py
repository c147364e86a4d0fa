"""What a launch was asked for: how many processes, on which machines, and what to do when not all goes well."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.config import environment
from lockstep.config.placement import DEFAULT_PORT, LOOPBACK, Node
from lockstep.errors import UserError

OnHang = Literal["restart", "stop", "report"]


@dataclass(frozen=True)
class Supervision:
    """What an agent does when not all goes well."""

    max_restarts: int = 0  # without progress
    min_nproc: int | None = None  # go on with fewer processes, down to so many, where a restart did not help
    grace_s: float = 30.0  # after a stop request, to end by oneself
    hang_limit_s: float | None = 30.0  # without a sign of life; None: hangs are not looked for
    on_hang: OnHang | None = None  # None: restart what can resume, stop anything else
    is_warm: bool = True  # ranks have torch imported when they start: [Note: nursery]
    incidents: Path | None = None  # for reports, where the job has no run folder


@dataclass(frozen=True)
class LaunchPlan:
    """How many processes, on which machine of how many. The names are torchrun's."""

    nproc: int | Literal["auto"] = 1
    nnodes: int | None = None
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_endpoint: str | None = None
    supervision: Supervision = Supervision()


def check(plan: LaunchPlan) -> None:
    if plan.nproc != "auto" and plan.nproc < 1:
        raise UserError(f"--nproc-per-node {plan.nproc}: expected at least 1, or auto")
    if plan.nnodes is not None and plan.nnodes < 1:
        raise UserError(f"--nnodes {plan.nnodes}: expected at least 1")
    supervision = plan.supervision
    if supervision.max_restarts < 0:
        raise UserError(f"--max-restarts {supervision.max_restarts}: expected 0 or more")
    if not 0 <= supervision.grace_s < math.inf:
        raise UserError(f"--grace {supervision.grace_s}: expected a number of seconds, 0 or more")
    if supervision.hang_limit_s is not None and not 0 < supervision.hang_limit_s < math.inf:
        raise UserError(f"--hang-limit {supervision.hang_limit_s:g}: expected seconds, more than 0, or off")
    least = supervision.min_nproc
    if least is not None and (least < 1 or (plan.nproc != "auto" and least > plan.nproc)):
        raise UserError(f"-n {least}:{plan.nproc}: expected the fewest processes and the most, as in 2:4")
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
        plan.master_addr or host or LOOPBACK,
        plan.master_port or DEFAULT_PORT,
    )
