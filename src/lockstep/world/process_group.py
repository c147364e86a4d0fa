"""Join and leave a job: from the launcher's environment variables to a process group and a `World`."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

# Its functions have the default process group as a default argument. Imported later, as the first optimizer does, it
# would hold the group of that moment for good, so that gloo's threads still ran while Python exits, and might crash it.
import torch.distributed.nn.functional
from torch.distributed import DistNetworkError

from lockstep.config import environment
from lockstep.config.placement import Placement
from lockstep.config.tested_versions import describe_untested_torch
from lockstep.errors import WorldError
from lockstep.launcher.exit_callbacks import closing_at_exit
from lockstep.launcher.job_store import meet_other_ranks, wait_for_all_ranks
from lockstep.launcher.nested_jobs import NESTED_JOB
from lockstep.launcher.tcp_store import interface_towards
from lockstep.supervision import heartbeat
from lockstep.supervision.heartbeat import Phase
from lockstep.world.device import choose_backend, choose_device, devices_are_shared, warn_if_no_parallelism
from lockstep.world.script_process import choose_threads_once, prepare_script_process
from lockstep.world.world import World

logger = logging.getLogger("lockstep")


def setup_distributed(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    device: str | torch.device | None = None,
) -> World:
    """Join the job this process was launched into, and return its `World`.

    Without arguments the launcher's environment variables decide; without a launcher this is a world of one process,
    and no process group is made. As in `launch`, the process then computes with OMP_NUM_THREADS threads, or with one,
    and a `LockstepError` that is not caught ends it with one line and its exit code.

    Args:
        rank: this process's rank, given together with `world_size`; MASTER_ADDR and MASTER_PORT are then used, or set
            to this machine. `rank=-1, world_size=1` means a single process.
        world_size: the number of processes in the job.
        backend: "nccl" or "gloo"; chosen by the device if omitted.
        timeout_s: the time limit for joining and for every collective; 600 seconds if omitted.
        device: the device to compute on; chosen automatically if omitted.
    """
    prepare_script_process()  # [Note: one contract]
    timeout_s = World().timeout_s if timeout_s is None else timeout_s
    if timeout_s <= 0:
        raise WorldError(f"timeout_s={timeout_s}: expected a number of seconds greater than 0")
    placement = _place(rank, world_size)
    choose_threads_once(is_main=placement.rank == 0)
    if placement.rank == 0 and (problem := describe_untested_torch(torch.__version__)) is not None:
        logger.warning("%s", problem)
    chosen_device = choose_device(placement, device)
    if dist.is_initialized():
        return _world_joined_before(placement, chosen_device, timeout_s)
    if placement.launcher == "none":
        return World(device=chosen_device, timeout_s=timeout_s)
    if backend is None or backend == "auto":
        backend = choose_backend(chosen_device.type, devices_are_shared(placement, chosen_device))
    if not dist.is_backend_available(backend):
        raise WorldError(f"backend={backend!r} is not available in this torch: try gloo")
    if backend == "nccl" and chosen_device.type != "cuda":
        raise WorldError(f"backend='nccl' carries CUDA tensors only, and the device is {chosen_device.type}: use gloo")

    environment.export_master_address(placement, interface_towards(placement.master_addr))
    if chosen_device.type == "cuda":
        torch.cuda.set_device(chosen_device)
    with heartbeat.during(Phase.JOINING):
        _join(placement, backend, timeout_s, chosen_device if backend == "nccl" else None)
    if placement.rank == 0:
        logger.info("Initialized DDP with %d processes (%s, %s)", placement.world_size, backend, chosen_device.type)
        warn_if_no_parallelism(placement, chosen_device, logger.warning)
    return _world_of(placement, chosen_device, backend, timeout_s)


def init_process_group(
    backend: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    timeout: float | timedelta | None = None,
) -> World:
    """`setup_distributed` with the argument names of torch's function.

    Args:
        backend: "nccl" or "gloo"; chosen by the device if omitted.
        world_size: the number of processes in the job, given together with `rank`.
        rank: this process's rank; if omitted, the launcher's environment variables decide.
        timeout: the time limit for joining and for every collective, in seconds or as a timedelta; 600 seconds if
            omitted.
    """
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return setup_distributed(rank, world_size, backend, timeout_s)


def cleanup_distributed() -> None:
    """Leave the job: destroy the process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def leave_on_exit() -> Iterator[None]:
    """Leave the job after the block. If the block fails, suppress errors while leaving: they are not the cause."""
    try:
        with closing_at_exit():
            yield
    except BaseException:
        with suppress(Exception):
            cleanup_distributed()
        raise
    cleanup_distributed()


def _place(rank: int | None, world_size: int | None) -> Placement:
    if rank is None and world_size is None:
        return environment.read_placement()
    if rank is None or world_size is None:
        raise WorldError(f"rank={rank} and world_size={world_size}: give both, or neither")
    explicit = environment.read_placement_for(rank, world_size)
    if environment.is_port_of_agent(explicit.master_port):
        launched = environment.read_placement()
        if (rank, world_size) == (launched.rank, launched.world_size):  # the script passes on what the agent has set
            return launched
        if explicit.launcher != "none":
            raise WorldError(f"rank={rank} and world_size={world_size}: {NESTED_JOB}")
    return explicit


def _world_of(placement: Placement, device: torch.device, backend: str, timeout_s: float) -> World:
    return World(
        rank=placement.rank,
        local_rank=placement.local_rank,
        size=placement.world_size,
        local_size=placement.local_world_size,
        node=placement.node,
        num_nodes=placement.num_nodes,
        device=device,
        backend=backend,
        timeout_s=timeout_s,
        launcher=placement.launcher,
        attempt=placement.attempt,
    )


def _world_joined_before(placement: Placement, device: torch.device, timeout_s: float) -> World:
    """The world of the first call, for a second one by a library, or by a Trainer that was given no world."""
    joined = (dist.get_rank(), dist.get_world_size())
    if (placement.rank, placement.world_size) != joined:
        if placement.launcher != "none":
            raise WorldError(
                f"cannot join as rank {placement.rank} of {placement.world_size}: this process is already rank "
                f"{joined[0]} of {joined[1]}; call cleanup_distributed() first"
            )
        placement = environment.read_placement_for(*joined)
    return _world_of(placement, device, dist.get_backend(), timeout_s)


def _join(placement: Placement, backend: str, timeout_s: float, bound_device: torch.device | None) -> None:
    timeout = timedelta(seconds=timeout_s)
    store = meet_other_ranks(placement, timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timeout,
        device_id=bound_device,  # else NCCL guesses a device at the first barrier
    )
    # A rank that exited at once, because of an error in its data, say, would break the connections of those that are
    # still connecting to it, and torch would log that at length.
    with suppress(DistNetworkError):  # rank 0, which hosts the store, has exited: it saw every rank connected
        wait_for_all_ranks(store, "connected", placement, time.monotonic() + timeout_s)
