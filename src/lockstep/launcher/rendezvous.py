"""Where the agents of a job meet, and the store each round of workers gets."""

from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed re-exports these untyped
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from lockstep.config.environment import Node
from lockstep.launcher.store import hold_store, reach_store

_MEETING_TIMEOUT = timedelta(minutes=10)


class FreshStoreRendezvous(RendezvousHandler):
    """A fixed set of machines, and a new store for every round.

    A store that is reused after a restart hands out the addresses of dead processes. So machine 0 holds a new one each
    round, on a port of its own; where there are other machines it tells them through a second store, at the address
    and port they were given, that lives as long as the job. On one machine everything listens on loopback.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._round = 0
        self._meeting: Store | None = None
        self._round_store: TCPStore | None = None
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        if self._node.index == 0:
            self._round_store = hold_store(self._node.master_addr, 0, _MEETING_TIMEOUT)
            if self._node.count > 1:
                self._meet().set(self._port_key, str(self._round_store.port))
        else:
            port = int(self._meet().get(self._port_key))
            self._round_store = reach_store(self._node.master_addr, port, _MEETING_TIMEOUT, self._who)
        place = RendezvousStoreInfo(self._node.master_addr, self._round_store.port)
        return RendezvousInfo(self._round_store, self._node.index, self._node.count, place)

    def _meet(self) -> Store:
        if self._meeting is None:
            address, port = self._node.master_addr, self._node.master_port
            if self._node.index == 0:
                self._meeting = hold_store(address, port, _MEETING_TIMEOUT)
            else:
                self._meeting = reach_store(address, port, _MEETING_TIMEOUT, self._who)
        return self._meeting

    @property
    def _port_key(self) -> str:
        return f"round/{self._round}/port"

    @property
    def _who(self) -> str:
        return f"machine {self._node.index}"

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
        self._round_store = self._meeting = None
        return True
