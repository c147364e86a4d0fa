"""Where the agents of a job meet before each attempt, and the new store that its ranks get."""

import secrets
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from lockstep.config.placement import STORE_FILE_VARIABLE, STORE_PREFIX_VARIABLE, MachineNode
from lockstep.config.plurals import number_noun
from lockstep.errors import RendezvousError, WorldError
from lockstep.launcher.elastic_adapter import replace_store_server
from lockstep.launcher.tcp_store import connect_store, host_store, is_own_address, wait_for_keys

if TYPE_CHECKING:
    from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore  # for its types
else:
    from torch.distributed import HashStore, PrefixStore, Store, TCPStore

_MEETING_TIMEOUT = timedelta(minutes=10)
_POLL_INTERVAL_S = 0.5
_JOB_ENDED_KEY = "ended"


class FreshStoreRendezvous(RendezvousHandler):
    """A fixed set of machines, and a new store for every round.

    A store that is reused after a restart hands out the addresses of dead processes. So machine 0 hosts a new one each
    round, on a free port. If there are other machines, it tells them the port, and a secret prefix for all keys,
    through a second store, the meeting store, at the configured address and port, which lives as long as the job. An
    agent that replaces a lost one joins the round after the last one that the lost agent took part in.

    On one machine the agent is alone and its ranks meet in a file; the store, on loopback, is only there for scripts
    that connect to MASTER_PORT themselves: [Note: job store].
    """

    def __init__(self, node: MachineNode) -> None:
        self._node = node
        self._round = 0
        self._meeting_store: Store | None = None
        self._round_store: TCPStore | None = None
        self._prefix = ""
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines, and return the store of this round."""
        self._round += 1
        address, index, count = self._node.master_addr, self._node.index, self._node.count
        if index == 0:
            self._round_store = host_store(address, 0, _MEETING_TIMEOUT)
            self._prefix = secrets.token_hex()
            self._exchange(f"{self._round_store.port} {self._prefix}")
        else:
            port, self._prefix = self._exchange("here")[0].split()
            self._round_store = self._connect(int(port))
        store = HashStore() if count == 1 else PrefixStore(self._prefix, self._round_store)
        return RendezvousInfo(store, index, count, RendezvousStoreInfo(address, self._round_store.port))

    def store_variables(self, folder: Path) -> dict[str, str]:
        """The variables by which this round's ranks find their store; `folder` is the agent's."""
        if self._node.count > 1:
            return {STORE_PREFIX_VARIABLE: self._prefix}
        return {STORE_FILE_VARIABLE: str(folder / f"store-{self._round}")}

    @property
    def num_restarts(self) -> int:
        """How many restarts the job has had; all machines agree on it, also one that joined later."""
        return self._round - 1

    def announce_end(self) -> None:
        """Tell the other machines that this one will not join another round, so that they do not wait for it."""
        if self._meeting_store is not None:
            with suppress(RuntimeError):  # machine 0 is gone already
                self._meeting_store.set(_JOB_ENDED_KEY, f"machine {self._node.index} ended the job; see its output")

    def _exchange(self, message: str) -> list[str]:
        """Send a message and return those of all machines, in order: machine 0's says where the round's store is."""
        if self._node.count == 1:
            return [message]
        address, port, index = self._node.master_addr, self._node.master_port, self._node.index
        if self._meeting_store is None:
            self._meeting_store = host_store(address, port, _MEETING_TIMEOUT) if index == 0 else self._connect(port)
            while self._meeting_store.check([self._key(index)]):
                self._round += 1
        keys = [self._key(other) for other in range(self._node.count)]
        try:
            self._meeting_store.set(keys[index], message)
            self._wait_for_machines(self._meeting_store, keys)
            return [self._meeting_store.get(key).decode() for key in keys]
        except RuntimeError as error:  # the base of torch's network and store errors
            if self._round == 1:
                raise
            raise RendezvousGracefulExitError("machine 0 ended the job or can no longer be reached") from error

    def _key(self, machine: int) -> str:
        return f"round/{self._round}/machine/{machine}"

    def _connect(self, port: int) -> TCPStore:
        try:
            return connect_store(self._node.master_addr, port, _MEETING_TIMEOUT, f"machine {self._node.index}")
        except WorldError as error:
            raise RendezvousError(str(error)) from None

    def _wait_for_machines(self, store: Store, keys: list[str]) -> None:
        deadline = time.monotonic() + _MEETING_TIMEOUT.total_seconds()
        while missing := wait_for_keys(store, keys, min(deadline, time.monotonic() + _POLL_INTERVAL_S)):
            if store.check([_JOB_ENDED_KEY]):
                raise RendezvousGracefulExitError(store.get(_JOB_ENDED_KEY).decode())
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"machine {self._node.index} timed out waiting for {number_noun('machine', missing)} of "
                    f"{self._node.count} at {self._node.master_addr}:{self._node.master_port}: not started, or cannot "
                    "connect"
                )

    # The rest is required by torch's RendezvousHandler.

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "lockstep"

    def get_run_id(self) -> str:
        return "lockstep"

    def num_nodes_waiting(self) -> int:
        return 0  # the set of machines is fixed

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def shutdown(self) -> bool:
        self._round_store = self._meeting_store = None
        return True


def c10d_rendezvous(num_machines: int, endpoint: str) -> RendezvousHandler:
    """Torch's own c10d rendezvous; but an endpoint of this machine listens there only, not on every interface."""
    host, _, port = endpoint.rpartition(":")
    is_ours = is_own_address(host)
    parameters = RendezvousParameters(
        "c10d",
        endpoint,
        run_id="lockstep",
        min_nodes=num_machines,
        max_nodes=num_machines,
        local_addr=host if is_ours else None,
    )
    if not is_ours:
        return get_rendezvous_handler(parameters)
    try:
        store = host_store(host, int(port), _MEETING_TIMEOUT)
    except WorldError:  # another agent of the job hosts it
        store = connect_store(host, int(port), _MEETING_TIMEOUT, "this agent")
    handler = create_handler(store, C10dRendezvousBackend(store, parameters.run_id), parameters)
    replace_store_server(handler, lambda address, port: host_store(address, port, _MEETING_TIMEOUT))
    return handler
