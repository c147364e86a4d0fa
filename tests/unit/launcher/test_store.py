"""Over which interface the processes of a job talk. How machines find it: tests/recipes/test_two_machines.py."""

import pytest

from lockstep.config.environment import pin_to
from lockstep.launcher.store import interface_towards


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_one_machine_stays_on_loopback() -> None:
    assert interface_towards("127.0.0.1") == interface_towards("localhost") == "lo"


def test_what_cannot_be_told_is_left_to_gloo() -> None:
    assert interface_towards("2001:db8::1") is None


def test_between_machines_only_gloo_needs_to_be_told() -> None:
    assert pin_to("eth0", one_machine=False) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert pin_to("lo", one_machine=True) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert pin_to(None, one_machine=False) == {}


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert pin_to("eth0", one_machine=False) == {}
