"""Where the agents of a job meet, and the store each round of workers gets."""

import time
from contextlib import suppress
from datetime import timedelta

from torch._C._distributed_c10d import Store, TCPStore  # torch.distributed re-exports these untyped
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from lockstep.config.placement import Node
from lockstep.errors import MeetingError, WorldError
from lockstep.launcher.store import await_keys, hold_store, reach_store

_MEETING_TIMEOUT = timedelta(minutes=10)
_LOOK_EVERY_S = 0.5
_ENDED = "ended"


class FreshStoreRendezvous(RendezvousHandler):
    """A fixed set of machines, and a new store for every round.

    A store that is reused after a restart hands out the addresses of dead processes. So machine 0 holds a new one each
    round, on a port of its own; where there are other machines it tells them through a second store, at the address
    and port they were given, that lives as long as the job. On one machine everything listens on loopback. An agent
    that takes the place of one that was lost comes to the round after the last that the other was in.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._round = 0
        self._meeting: Store | None = None
        self._round_store: TCPStore | None = None
        self._closed = False

    def next_rendezvous(self) -> RendezvousInfo:
        self._round += 1
        address, index, count = self._node.master_addr, self._node.index, self._node.count
        if index == 0:
            self._round_store = hold_store(address, 0, _MEETING_TIMEOUT)
            self._meet(str(self._round_store.port))
        else:
            self._round_store = self._reach(int(self._meet("here")[0]))
        return RendezvousInfo(self._round_store, index, count, RendezvousStoreInfo(address, self._round_store.port))

    def _meet(self, word: str) -> list[str]:
        """Say a word and hear every machine's, in order: machine 0 says the port of the round's store."""
        if self._node.count == 1:
            return [word]
        address, port, index = self._node.master_addr, self._node.master_port, self._node.index
        if self._meeting is None:
            self._meeting = hold_store(address, port, _MEETING_TIMEOUT) if index == 0 else self._reach(port)
            while self._meeting.check([self._key(index)]):
                self._round += 1
        keys = [self._key(other) for other in range(self._node.count)]
        try:
            self._meeting.set(keys[index], word)
            self._await_machines(self._meeting, keys)
            return [self._meeting.get(key).decode() for key in keys]
        except RuntimeError as error:  # the base of torch's network and store errors
            if self._round == 1:
                raise
            raise RendezvousGracefulExitError("machine 0 has ended the job, or cannot be reached any more") from error

    def _key(self, machine: int) -> str:
        return f"round/{self._round}/machine/{machine}"

    def _reach(self, port: int) -> TCPStore:
        try:
            return reach_store(self._node.master_addr, port, _MEETING_TIMEOUT, f"machine {self._node.index}")
        except WorldError as error:
            raise MeetingError(str(error)) from None

    def _await_machines(self, meeting: Store, keys: list[str]) -> None:
        deadline = time.monotonic() + _MEETING_TIMEOUT.total_seconds()
        while missing := await_keys(meeting, keys, min(deadline, time.monotonic() + _LOOK_EVERY_S)):
            if meeting.check([_ENDED]):
                raise RendezvousGracefulExitError(meeting.get(_ENDED).decode())
            if time.monotonic() > deadline:
                raise MeetingError(
                    f"machine {self._node.index} waited in vain for machine {', '.join(map(str, missing))} of "
                    f"{self._node.count} at {self._node.master_addr}:{self._node.master_port}: not started, or cannot "
                    "connect"
                )

    @property
    def num_restarts(self) -> int:
        """Of the job: all machines count alike, also one that came later."""
        return self._round - 1

    def tell_end(self) -> None:
        """This machine will not come again: the others need not wait for it."""
        if self._meeting is not None:
            with suppress(RuntimeError):  # machine 0 is gone already
                self._meeting.set(_ENDED, f"machine {self._node.index} has ended the job; see there")

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
