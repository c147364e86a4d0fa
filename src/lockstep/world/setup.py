"""Joining and leaving a job: from the launcher's variables to a `World` with a process group."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store  # torch.distributed re-exports these untyped
from torch.distributed import DistNetworkError

from lockstep.config import environment
from lockstep.config.placement import Placement
from lockstep.errors import WorldError
from lockstep.launcher.store import await_keys, hold_store, interface_towards, reach_store
from lockstep.supervision import pulse
from lockstep.supervision.pulse import Phase
from lockstep.world.device import choose_backend, choose_device, devices_are_shared, warn_if_pointless
from lockstep.world.world import World

logger = logging.getLogger("lockstep")


def setup_distributed(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    timeout_s: float | None = None,
    device: str | torch.device | None = None,
) -> World:
    """Join the job this process was launched into, and return its place there.

    With no arguments the launcher's variables decide; without a launcher it is a world of one and no process group is
    made. `rank` and `world_size` may be given instead (both, or neither): MASTER_ADDR and MASTER_PORT are then honoured
    or set to this machine. `rank=-1, world_size=1` also means alone. `timeout_s` bounds joining and every collective.
    """
    timeout_s = World().timeout_s if timeout_s is None else timeout_s
    if timeout_s <= 0:
        raise WorldError(f"timeout_s={timeout_s}: expected a number of seconds greater than 0")
    placement = _place(rank, world_size)
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

    environment.settle(placement, interface_towards(placement.master_addr))
    if chosen_device.type == "cuda":
        torch.cuda.set_device(chosen_device)
    with pulse.during(Phase.JOINING):
        _join(placement, backend, timeout_s, chosen_device if backend == "nccl" else None)
    if placement.rank == 0:
        logger.info("Initialized DDP with %d processes (%s, %s)", placement.world_size, backend, chosen_device.type)
        warn_if_pointless(placement, chosen_device, logger.warning)
    return _world_of(placement, chosen_device, backend, timeout_s)


def init_process_group(
    backend: str | None = None,
    world_size: int | None = None,
    rank: int | None = None,
    timeout: float | timedelta | None = None,
) -> World:
    """`setup_distributed` with torch's argument names; `timeout` in seconds or as a timedelta."""
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    return setup_distributed(rank, world_size, backend, timeout_s)


def cleanup_distributed() -> None:
    """Leave the job. Harmless when there is nothing to leave."""
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def leaving_at_the_end() -> Iterator[None]:
    """Leave the job after the block; if it fails, whatever leaving has to say about lost peers is not the cause."""
    try:
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
    return environment.placement_of(rank, world_size)


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
    """A second call, by a library or a Trainer made without a world, sees the world the first one joined."""
    joined = (dist.get_rank(), dist.get_world_size())
    if (placement.rank, placement.world_size) != joined:
        if placement.launcher != "none":
            raise WorldError(
                f"rank {placement.rank} of {placement.world_size} is to join, but this process is already rank "
                f"{joined[0]} of {joined[1]}: call cleanup_distributed() first"
            )
        placement = environment.placement_of(*joined)
    return _world_of(placement, device, dist.get_backend(), timeout_s)


def _join(placement: Placement, backend: str, timeout_s: float, bound_device: torch.device | None) -> None:
    timeout = timedelta(seconds=timeout_s)
    store = _meet(placement, timeout)
    dist.init_process_group(
        backend,
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timeout,
        device_id=bound_device,  # else NCCL guesses a device at the first barrier
    )
    # One that goes on and ends at once, over a mistake in its data say, would cut off those that still connect to it,
    # and torch would tell of that at length.
    with suppress(DistNetworkError):  # rank 0 held the store and has ended: it had seen everyone connected
        _await_everyone(store, "connected", placement, time.monotonic() + timeout_s)


def _meet(placement: Placement, timeout: timedelta) -> Store:
    """The store at which every rank of this job has arrived."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        if placement.store_is_hosted or placement.rank != 0:
            store = reach_store(placement.master_addr, placement.master_port, timeout, f"rank {placement.rank}")
        else:
            # A job of one process need not be found by anybody, so it need not fight over a port either.
            store = hold_store(placement.master_addr, placement.master_port if placement.world_size > 1 else 0, timeout)
        try:
            # A launcher's store outlives us: without a prefix of its own, a restarted or rejoined job would read the
            # addresses its predecessor left there.
            joins = store.add(f"lockstep/{placement.attempt}/joins/{placement.rank}", 1)
            fresh = PrefixStore(f"lockstep/{placement.attempt}/{joins}", store)
            _await_everyone(fresh, "arrived", placement, deadline)
            return fresh
        except DistNetworkError:
            # Whoever leaves a job and joins again faster than rank 0, which holds the store, finds the old one, which
            # goes while the new one is awaited. A launcher's store goes with the launcher only.
            if placement.store_is_hosted or placement.rank == 0 or time.monotonic() > deadline:
                raise


def _await_everyone(store: Store, stage: str, placement: Placement, deadline: float) -> None:
    """Wait until every rank has come so far, so that a missing one is named instead of a bare timeout later."""
    reached = [f"{stage}/{rank}" for rank in range(placement.world_size)]
    store.set(reached[placement.rank], "1")
    missing = await_keys(store, reached, deadline)
    if missing:
        raise WorldError(
            f"rank {placement.rank} waited in vain for rank{'s' * (len(missing) > 1)} "
            f"{', '.join(map(str, missing))} of {placement.world_size} at "
            f"{placement.master_addr}:{placement.master_port}: not started, or cannot connect"
        )
