"""The store in which the ranks of a job meet: a file of the agent on one machine, a TCPStore on several.

[Note: job store]

A TCPStore has no access control: whoever can connect can list, change and delete its keys, and on one machine that is
every user. So ranks that all run on one machine, under a lockstep agent, meet in a file in the agent's folder, which
only its own user can enter. There is a new file for each attempt. Between machines, and where no agent of lockstep
started the ranks, the store stays a TCPStore.

The file only grows, by some 50 bytes with every key that is set and every counter that is raised; reading adds nothing.
"""

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from torch.distributed import DistNetworkError

from lockstep.config.placement import Placement
from lockstep.config.plurals import number_noun
from lockstep.errors import WorldError
from lockstep.launcher.tcp_store import connect_store, host_store, wait_for_keys

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FileStore, PrefixStore, Store  # for its types, which the public name lacks
else:
    from torch.distributed import FileStore, PrefixStore, Store


def meet_other_ranks(placement: Placement, timeout: timedelta) -> Store:
    """Return the store that every rank of this job has opened; its keys are new each time a rank joins."""
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        store = _open_store(placement, timeout)
        try:
            # An agent's store outlives the process group: without a new prefix, ranks that join again would read the
            # addresses that the previous group left there.
            joins = store.add(f"lockstep/{placement.attempt}/joins/{placement.rank}", 1)
            fresh = PrefixStore(f"lockstep/{placement.attempt}/{joins}", store)
            wait_for_all_ranks(fresh, "arrived", placement, deadline)
            return fresh
        except DistNetworkError:
            # If this rank has left and joins again before rank 0 does, it finds the old store, which rank 0 then closes
            # while this rank waits for the others: try again. A launcher's store ends only with the launcher.
            if placement.store_is_hosted or placement.rank == 0 or time.monotonic() > deadline:
                raise


def wait_for_all_ranks(store: Store, stage: str, placement: Placement, deadline: float) -> None:
    """Wait until every rank has reached this stage; if one does not, name it in the error."""
    reached = [f"{stage}/{rank}" for rank in range(placement.world_size)]
    store.set(reached[placement.rank], "1")
    missing = wait_for_keys(store, reached, deadline)
    if missing:
        where = f"{placement.master_addr}:{placement.master_port}: not started, or cannot connect"
        raise WorldError(
            f"rank {placement.rank} timed out waiting for {number_noun('rank', missing)} of {placement.world_size} "
            + ("to join the job" if placement.store_file else f"at {where}")
        )


def _open_store(placement: Placement, timeout: timedelta) -> Store:
    if placement.store_file:
        store: Store = FileStore(placement.store_file)
        store.set_timeout(timeout)
    elif placement.store_is_hosted or placement.rank != 0:
        store = connect_store(placement.master_addr, placement.master_port, timeout, f"rank {placement.rank}")
    else:
        # No other process connects to a job of one, so any free port will do.
        store = host_store(placement.master_addr, placement.master_port if placement.world_size > 1 else 0, timeout)
    return PrefixStore(placement.store_prefix, store) if placement.store_prefix else store
