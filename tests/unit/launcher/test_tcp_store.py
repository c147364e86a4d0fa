"""The interface that a job's processes use, and host names that resolve late. More: recipes/test_two_machines.py."""

import socket
from typing import Any

import pytest

from lockstep.config.environment import interface_variables
from lockstep.launcher import tcp_store
from lockstep.launcher.tcp_store import interface_towards, wait_for_hostname


@pytest.fixture(autouse=True)
def no_interface_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_one_machine_stays_on_loopback() -> None:
    assert interface_towards("127.0.0.1") == interface_towards("localhost") == "lo"


def test_an_unknown_interface_is_left_to_gloo() -> None:
    assert interface_towards("2001:db8::1") is None


def test_between_machines_only_gloo_needs_an_interface() -> None:
    assert interface_variables("eth0", one_machine=False) == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert interface_variables("lo", one_machine=True) == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert interface_variables(None, one_machine=False) == {}


def test_a_store_at_the_machines_own_name_is_reached_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's /etc/hosts gives it 127.0.1.1, at which no other machine finds the store."""
    known = {"mine": "127.0.1.1"}
    monkeypatch.setattr(socket, "gethostname", lambda: "mine")
    monkeypatch.setattr(socket, "getfqdn", lambda: "mine.example")
    look_up = socket.getaddrinfo

    def look_up_here(host: str, *rest: Any, **more: Any) -> Any:
        return look_up(known.get(host, host), *rest, **more)

    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **more: look_up(known.get(host, host), *rest, **more)
    )
    listening = {"mine": "0.0.0.0", "localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}
    for address, expected in listening.items():
        with tcp_store._listen(address, 0) as listener:
            assert listener.getsockname()[0] == expected


def test_the_users_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert interface_variables("eth0", one_machine=False) == {}


def test_a_name_that_does_not_resolve_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(tcp_store, "_resolves", lambda _: next(answers))
    monkeypatch.setattr(tcp_store, "_RESOLVE_INTERVAL_S", 0.0)
    wait_for_hostname("mine-0.mine", timeout_s=20)
    assert not list(answers)
    assert capsys.readouterr().err == ("lockstep: mine-0.mine does not resolve yet: waiting for up to 20 s\n")


def test_a_name_that_never_resolves_is_not_waited_for_forever(capsys: pytest.CaptureFixture[str]) -> None:
    wait_for_hostname("no.such.name.invalid", timeout_s=0)
    assert "no.such.name.invalid does not resolve yet" in capsys.readouterr().err
    wait_for_hostname("127.0.0.1", timeout_s=0)
    assert not capsys.readouterr().err
