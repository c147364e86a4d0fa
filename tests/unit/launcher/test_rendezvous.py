"""Rendezvous of several machines: late ones, lost ones and their replacements."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from socket import AF_INET, gethostbyname

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo

from lockstep.config.placement import MachineNode
from lockstep.errors import EXIT_FAILED, RendezvousError
from lockstep.launcher import rendezvous
from lockstep.launcher.rendezvous import FreshStoreRendezvous, c10d_rendezvous
from tests.commands import free_port


class Machines:
    """Agents of two machines, each of which may be replaced."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._port = free_port()
        self.all = [self.new(0), self.new(1)]

    def new(self, index: int) -> FreshStoreRendezvous:
        return FreshStoreRendezvous(MachineNode(index, 2, "127.0.0.1", self._port))

    def meet(self) -> list[RendezvousInfo]:
        coming = [self._pool.submit(machine.next_rendezvous) for machine in self.all]
        return [each.result(timeout=20) for each in coming]


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setattr(rendezvous, "_MEETING_TIMEOUT", timedelta(seconds=10))
    with ThreadPoolExecutor(2) as pool:
        yield Machines(pool)


def port_of(info: RendezvousInfo) -> int:
    return info.bootstrap_store_info.master_port


def listeners() -> set[tuple[str, int]]:
    return {tuple(each.laddr) for each in psutil.Process().net_connections() if each.status == psutil.CONN_LISTEN}


def own_address() -> str:
    """An address of this machine that is not loopback, if it has one."""
    addresses = [each.address for found in psutil.net_if_addrs().values() for each in found if each.family == AF_INET]
    return next((each for each in addresses if not each.startswith("127.")), "127.0.0.2")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", own_address()])
def test_torchs_rendezvous_listens_at_its_endpoint_only(host: str) -> None:
    before = listeners()
    handler = c10d_rendezvous(1, f"{host}:{free_port()}")
    try:
        info = handler.next_rendezvous()
        assert info.bootstrap_store_info.master_addr == host
        assert {address for address, _ in listeners() - before} == {gethostbyname(host)}
    finally:
        handler.shutdown()


def test_another_agent_connects_to_the_store_of_the_first() -> None:
    before = listeners()
    endpoint = f"127.0.0.1:{free_port()}"
    handlers = [c10d_rendezvous(2, endpoint) for _ in range(2)]
    try:
        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(lambda handler: handler.next_rendezvous(), handlers))
        assert sorted(info.rank for info in found) == [0, 1]
        assert {address for address, _ in listeners() - before} == {"127.0.0.1"}
    finally:
        for handler in handlers:
            handler.shutdown()


def test_one_machine_meets_in_a_file_and_several_under_a_secret_prefix(machines: Machines, tmp_path: Path) -> None:
    alone = FreshStoreRendezvous(MachineNode())
    files = set()
    for _ in range(2):
        alone.next_rendezvous()
        files |= set(alone.store_variables(tmp_path).items())
    assert {name for name, _ in files} == {"LOCKSTEP_STORE_FILE"}
    assert len(files) == 2, "a new one for each round"
    prefixes = set()
    for _ in range(2):
        machines.meet()
        found = [machine.store_variables(tmp_path) for machine in machines.all]
        assert found[0] == found[1]
        prefixes.add(found[0]["LOCKSTEP_STORE_PREFIX"])
    assert [len(each) for each in prefixes] == [64, 64]


def test_every_round_has_a_new_store(machines: Machines) -> None:
    first, second = machines.meet(), machines.meet()
    assert port_of(first[0]) == port_of(first[1]) != port_of(second[0]) == port_of(second[1])
    assert [info.rank for info in second] == [0, 1]


def test_an_agent_that_replaces_a_lost_one_joins_the_next_round(machines: Machines) -> None:
    machines.meet()
    machines.meet()
    machines.all[1] = machines.new(1)
    third = machines.meet()
    assert port_of(third[0]) == port_of(third[1])
    assert [info.rank for info in third] == [0, 1]
    assert {machine.num_restarts for machine in machines.all} == {2}
    third[0].store.set("key", "here")
    assert third[1].store.get("key") == b"here"


@pytest.mark.parametrize("index", [0, 1])
def test_a_missing_machine_is_a_failure_that_may_be_tried_again(
    machines: Machines, monkeypatch: pytest.MonkeyPatch, index: int
) -> None:
    monkeypatch.setattr(rendezvous, "_MEETING_TIMEOUT", timedelta(seconds=0.2))
    with pytest.raises(RendezvousError, match=r"timed out waiting for machine 1|machine 1 cannot reach") as caught:
        machines.all[index].next_rendezvous()
    assert caught.value.exit_code == EXIT_FAILED, "code 2 would be a mistake, and no scheduler would try it again"


def test_all_missing_machines_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_MEETING_TIMEOUT", timedelta(seconds=0.2))
    alone = FreshStoreRendezvous(MachineNode(0, 3, "127.0.0.1", free_port()))
    with pytest.raises(RendezvousError, match="machine 0 timed out waiting for machines 1, 2 of 3 at 127"):
        alone.next_rendezvous()
